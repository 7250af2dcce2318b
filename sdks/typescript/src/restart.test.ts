/** A server process that is killed and started again on its port, as an operator or a crash does it. */
import { expect, inject, test } from "vitest";

import { ENDLESS, failure, LONG, PROMPT, read } from "../testing/moves.js";
import { killProcess, openProcess, startProcess } from "../testing/servers.js";
import * as kakeya from "./index.js";

test("a client waits for a server that is started again, and learns that its session is gone", async () => {
  const control = inject("control");
  const target = await openProcess(control);
  await using client = new kakeya.Client(target);
  const session = await client.createSession({ strategy: ENDLESS });
  const other = await client.createSession();
  await session.append(PROMPT);
  const stream = session.generate(LONG);
  const first: IteratorResult<number, unknown> = await stream[Symbol.asyncIterator]().next();
  expect(first.done).toBe(false);
  await killProcess(control, target);
  // In the middle of a stream, and between calls.
  const calls = [stream.result(), other.append(PROMPT), other.info()].map((call) =>
    failure(kakeya.SessionNotFound, call),
  );
  const info = client.serverInfo();
  await startProcess(control, target);
  await Promise.all(calls);
  expect((await info).vocabSize).toBeGreaterThan(0);
  expect(stream.tokenIds.length).toBeGreaterThan(0);
  await using fresh = await client.createSession();
  await fresh.append(PROMPT);
  expect(await read(fresh.generate(3))).toHaveLength(3);
});

test.each(["127.0.0.1:1", "no-such-host.invalid:1"])(
  "a server that was never there is an error soon that says where and what to do: %s",
  async (target) => {
    await using client = new kakeya.Client(target, { timeoutSeconds: null });
    const error = await failure(kakeya.ConnectionFailed, client.createSession());
    expect(error.message).toContain(target);
    expect(error.message).toContain("check host and port, and that a server runs there");
  },
);
