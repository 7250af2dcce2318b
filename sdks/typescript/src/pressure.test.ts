/** Many aborts at any moment leave no session busy; a slow reader needs little memory and holds up no other call. */
import { expect, inject, test } from "vitest";

import { ABORTS, STREAM_TOKENS } from "../testing/amounts.js";
import { ENDLESS, failure, LONG, PROMPT, untilIdle, untilStill } from "../testing/moves.js";
import { statisticsOf, openServer } from "../testing/servers.js";
import { Client, StateError, type Session } from "./index.js";

// A connection takes 256 calls at a time.
const AGENTS = 600;

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
  // And the server says so itself. A stream that was aborted before its request left is none of its Generates.
  const statistics = await statisticsOf(inject("control"), target);
  expect(statistics).toMatchObject({
    session_active: 0,
    session_kv_reserved_bytes: 0,
    session_kv_live_bytes: 0,
    generate_active: 0,
    generate_queue_depth: 0,
    session_total: sessions.length,
  });
  expect(statistics["generate_total"]).toBeLessThanOrEqual(ABORTS);
  expect(statistics["generate_total"]).toBeGreaterThan(ABORTS / 2);
});

test("more agents than a connection takes calls share one client without an error", async () => {
  // gRPC counts calls that are over until they are freed, so it refuses some that this side let through.
  const { target } = await openServer(inject("control"), { engine: { max_sessions: AGENTS } });
  await using client = new Client(target, { retry: { attempts: 1 } });
  const day = async (): Promise<void> => {
    await using session = await client.createSession();
    await session.append([1]);
    expect(await session.append([2, 3])).toBe(3);
  };
  await Promise.all(Array.from({ length: AGENTS }, day));
});

test("a stream read slowly needs hardly more memory than one read fast, and holds up no other call", async () => {
  await using client = new Client(inject("target"));
  await using other = await client.createSession();
  const readBy = async (count: number, pause: (session: Session) => Promise<unknown>): Promise<Reading> => {
    await using session = await client.createSession({ strategy: ENDLESS });
    await session.append(PROMPT);
    return await reading(session, count, async () => {
      await pause(session);
      await other.info();
    });
  };
  const goOn = (): Promise<void> => Promise.resolve();
  await readBy(100, untilStill); // what is made once, such as compiled code, is no stream's
  const fast = await readBy(STREAM_TOKENS, goOn);
  const slow = await readBy(STREAM_TOKENS, untilStill);
  expect(slow.tokenIds).toEqual(fast.tokenIds);
  // Ids take eight bytes each; frames, of some hundred, must not stay.
  expect(fast.grownBytes).toBeLessThan(2 ** 20 + 32 * STREAM_TOKENS);
  // Of what has not been read, no more than a connection lets be in flight: 64 KiB, in very many buffers.
  expect(slow.grownBytes).toBeLessThan(fast.grownBytes + 2 ** 22);
});

test("a stream that is not read can be stopped", async () => {
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

/** What reading a stream took: by how many bytes this process grew. */
interface Reading {
  readonly tokenIds: readonly number[];
  readonly grownBytes: number;
}

/** Reads `count` tokens, with a pause after each tenth of them, beginning with the first. */
async function reading(session: Session, count: number, pause: () => Promise<void>): Promise<Reading> {
  const before = heldBytes();
  let most = before;
  const stream = session.generate(count);
  let position = PROMPT.length;
  for await (const detail of stream.details()) {
    expect(detail.position).toBe(position++);
    if ((position - PROMPT.length) % (count / 10) !== 1) continue;
    await pause();
    most = Math.max(most, heldBytes());
  }
  const { tokenIds } = await stream.result();
  expect(tokenIds).toHaveLength(count);
  return { tokenIds, grownBytes: most - before };
}

/** Of objects and of buffers outside of the heap, such as those of connections, once what is unused has gone. */
function heldBytes(): number {
  const collect = globalThis.gc;
  if (collect === undefined) throw new Error("run with --expose-gc");
  collect();
  const { heapUsed, external } = process.memoryUsage();
  return heapUsed + external;
}

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
