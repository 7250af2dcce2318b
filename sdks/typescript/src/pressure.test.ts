/** Many aborts at any moment leave no session busy; a slow reader holds back the server, and no other call. */
import { setTimeout as sleep } from "node:timers/promises";

import { expect, inject, test } from "vitest";

import { ABORTS, STREAM_TOKENS } from "../testing/amounts.js";
import { ENDLESS, failure, LONG, PROMPT, untilIdle } from "../testing/moves.js";
import { openServer } from "../testing/servers.js";
import { Client, StateError } from "./index.js";

test("aborts at random moments leave no session busy", async () => {
  const random = mulberry(1);
  // The next Generate waits for the last one to leave; nothing here measures how long.
  const { target } = await openServer(inject("control"), { server: { busy_wait_seconds: 60 } });
  await using client = new Client(target);
  const sessions = await Promise.all(Array.from({ length: 4 }, () => client.createSession({ strategy: ENDLESS })));
  for (const session of sessions) await session.append(PROMPT);
  const abortMany = async (session: (typeof sessions)[number]): Promise<void> => {
    for (let n = 0; n < ABORTS / sessions.length; n++) {
      const abort = new AbortController();
      const mine = new Error("enough");
      const stream = session.generate(LONG, { signal: abort.signal, drafting: random() < 0.5 });
      const left = Math.floor(random() * 4);
      const isTimed = random() < 0.5;
      const reading = (async () => {
        let seen = 0;
        for await (const id of stream) {
          expect(id).toBeLessThan(128);
          if (!isTimed && seen++ >= left) abort.abort(mine);
        }
      })();
      if (isTimed)
        setTimeout(() => {
          abort.abort(mine);
        }, random() * 10);
      await expect(reading).rejects.toBe(mine);
    }
  };
  await Promise.all(sessions.map(abortMany));
  for (const session of sessions) {
    const { historyLength } = await untilIdle(session);
    expect(await session.append([1])).toBe(historyLength + 1);
    await session.close();
  }
});

test("a stream read slowly stays small here, and holds up no other call", async () => {
  const collect = globalThis.gc;
  if (collect === undefined) throw new Error("run with --expose-gc");
  await using client = new Client(inject("target"));
  await using session = await client.createSession({ strategy: ENDLESS });
  await using other = await client.createSession();
  await session.append(PROMPT);
  const stream = session.generate(STREAM_TOKENS);
  let smallest = Infinity;
  let largest = 0;
  let position = PROMPT.length;
  for await (const detail of stream.details()) {
    expect(detail.position).toBe(position++);
    if (position % Math.ceil(STREAM_TOKENS / 10) !== 0) continue;
    await sleep(20);
    await other.info();
    collect();
    const { heapUsed } = process.memoryUsage();
    smallest = Math.min(smallest, heapUsed);
    largest = Math.max(largest, heapUsed);
  }
  expect(position).toBe(PROMPT.length + STREAM_TOKENS);
  // Ids take eight bytes each; frames, of some hundred, must not stay.
  expect(largest - smallest).toBeLessThan(2 ** 20 + 32 * STREAM_TOKENS);
  expect((await stream.result()).generatedTokens).toBe(STREAM_TOKENS);
});

test("a stream that nobody reads can be stopped", async () => {
  await using client = new Client(inject("target"));
  await using session = await client.createSession({ strategy: ENDLESS });
  await session.append(PROMPT);
  const stream = session.generate(LONG);
  while ((await session.info()).historyLength < PROMPT.length + 50);
  expect(stream.tokenIds).toEqual([]);
  stream.cancel();
  await untilIdle(session);
  await failure(StateError, stream.result());
});

/** Numbers in [0, 1) that are the same in every run. */
function mulberry(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}
