/** A server process that is killed and started again on its port, as an operator or a crash does it. */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { expect, inject, test } from "vitest";

import { ENDLESS, failure, LONG, PROMPT, read } from "../testing/moves.js";
import { killProcess, openProcess, startProcess } from "../testing/servers.js";
import * as kakeya from "./index.js";

test("a client waits for a server that is started again, and learns that its session is gone", async () => {
  const control = inject("control");
  const target = await openProcess(control);
  await using client = new kakeya.Client(target);
  const session = await client.createSession({ strategy: ENDLESS, eosTokenIds: [] });
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

test("a stream goes on where a server that keeps sessions was killed, and so does what follows", async () => {
  const control = inject("control");
  const folder = await mkdtemp(join(tmpdir(), "kakeya-"));
  const target = await openProcess(control, ["--determinism=batch-invariant", `--state-dir=${join(folder, "state")}`]);
  await using client = new kakeya.Client(target);

  /** Two turns, between the first tokens of which `between` happens; then what a client does that has only the id. */
  async function conversation(between: (turn: number) => Promise<void>): Promise<unknown[]> {
    const said: unknown[] = [];
    const session = await client.createSession({ strategy: ENDLESS, label: "kept" });
    for (const turn of [0, 1]) {
      said.push(await session.append(PROMPT));
      const stream = session.generate(250, { temperature: 1.2, seed: turn, logprobs: true });
      const tokens = stream.details();
      for (let read = 0; read < 2; read++) {
        await tokens.next();
        await between(turn);
      }
      const { tokenIds, logprobs, stopReason, historyLength } = await stream.result();
      said.push([tokenIds, logprobs, stopReason, historyLength]);
    }
    await using other = new kakeya.Client(target);
    const found = await other.session(session.id);
    const fork = await found.fork();
    said.push([await fork.append(PROMPT), found.historyLength, (await found.info()).label]);
    said.push((await fork.generate(5).result()).tokenIds, await fork.close(), await session.close());
    return said;
  }

  const undisturbed = await conversation(() => Promise.resolve());
  const killed = await conversation(async (turn) => {
    if (turn > 0) return;
    await killProcess(control, target);
    await startProcess(control, target);
  });
  expect(killed).toEqual(undisturbed);
  expect((await client.serverInfo()).durability).toBe("power");
  await killProcess(control, target);
  await rm(folder, { recursive: true });
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
