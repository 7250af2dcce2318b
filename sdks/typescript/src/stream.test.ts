/** What may be done to a stream while it runs, against the real server. */
import { setTimeout as sleep } from "node:timers/promises";

import { afterAll, beforeAll, beforeEach, expect, inject, test } from "vitest";

import { ENDLESS, failure, LONG, PROMPT, read, untilIdle } from "../testing/moves.js";
import * as kakeya from "./index.js";

let client: kakeya.Client;
let session: kakeya.Session;
beforeAll(() => {
  client = new kakeya.Client(inject("target"));
});
beforeEach(async () => {
  session = await client.createSession({ strategy: ENDLESS });
  await session.append(PROMPT);
  return async () => {
    await session.close();
  };
});
afterAll(async () => {
  await client.close();
});

/** A Generate that does not end by itself, and a promise that is kept once it is read and runs. */
function longGenerate(options: kakeya.GenerateOptions = {}): [kakeya.GenerateStream, Promise<void>] {
  const began = resolvers();
  const stream = session.generate(LONG, { ...options, onProgress: began.resolve });
  return [stream, began.promise];
}

test("leaving the loop stops the generation and keeps what came", async () => {
  const stream = session.generate(LONG);
  const ids = await read(stream, 3);
  const info = await untilIdle(session);
  expect(stream.tokenIds).toEqual(ids);
  expect(info.historyLength).toBeGreaterThanOrEqual(PROMPT.length + 3);
  expect(info.historyLength).toBeLessThan(PROMPT.length + LONG);
  expect((await failure(kakeya.StateError, stream.result())).message).toContain("cancelled after 3 tokens");
});

test("after a stream that was left, ids go to the end of the history", async () => {
  await read(session.generate(LONG), 2);
  const length = await session.append([1, 2, 3]);
  expect(length).toBeGreaterThanOrEqual(PROMPT.length + 5);
  expect([session.historyLength, (await session.info()).historyLength]).toEqual([length, length]);
});

test("leaving its block stops the generation", async () => {
  {
    await using stream = session.generate(LONG);
    await stream[Symbol.asyncIterator]().next();
  }
  await untilIdle(session);
});

test("an error in the loop's body stops the generation", async () => {
  const stream = session.generate(LONG);
  const loop = async (): Promise<void> => {
    for await (const id of stream) throw new RangeError(`mine at ${id}`);
  };
  await failure(RangeError, loop());
  await untilIdle(session);
});

test("cancel ends an iteration quietly, and twice is once", async () => {
  const [stream, began] = longGenerate();
  const reading = read(stream);
  await began;
  stream.cancel();
  expect(await reading).toEqual(stream.tokenIds);
  stream.cancel();
  await untilIdle(session);
});

test("a signal stops the generation, and reading throws its reason", async () => {
  const abort = new AbortController();
  const [stream, began] = longGenerate({ signal: abort.signal });
  const reading = read(stream);
  await began;
  const reason = new Error("the user has gone");
  abort.abort(reason);
  await expect(reading).rejects.toBe(reason);
  await expect(stream.result()).rejects.toBe(reason);
  await untilIdle(session);
});

test("a signal stops a generation that is not read", async () => {
  const abort = new AbortController();
  session.generate(LONG, { signal: abort.signal });
  abort.abort();
  const info = await untilIdle(session);
  expect(info.historyLength).toBeLessThan(PROMPT.length + LONG);
});

test("a signal that has spoken before stops the call before it is made", async () => {
  const length = (await session.info()).historyLength;
  const signal = AbortSignal.abort(new Error("too late"));
  expect(() => session.generate(1, { signal })).toThrow("too late");
  await expect(session.append([1], { signal })).rejects.toThrow("too late");
  await expect(session.info({ signal })).rejects.toThrow("too late");
  expect((await session.info()).historyLength).toBe(length);
});

test("a signal that outlives its calls is left as it was", async () => {
  const { signal } = new AbortController();
  let listeners = 0;
  const [add, remove] = [signal.addEventListener.bind(signal), signal.removeEventListener.bind(signal)];
  signal.addEventListener = (...all: Parameters<typeof add>) => {
    listeners += 1;
    add(...all);
  };
  signal.removeEventListener = (...all: Parameters<typeof remove>) => {
    listeners -= 1;
    remove(...all);
  };
  await session.append([1], { signal });
  await session.generate(2, { signal }).result();
  await session.info({ signal });
  expect(listeners).toBe(0);
});

test("a stream that is dropped stops the generation", async () => {
  const collect = globalThis.gc;
  if (collect === undefined) throw new Error("run with --expose-gc");
  session.generate(LONG);
  while ((await session.info()).isGenerating) {
    collect();
    await sleep(10);
  }
  expect((await session.info()).historyLength).toBeLessThan(PROMPT.length + LONG);
});

test("an error in the progress callback stops the generation", async () => {
  const mine = new RangeError("mine");
  const stream = session.generate(LONG, {
    onProgress: () => {
      throw mine;
    },
  });
  // It is what became of the stream, however often that is asked for.
  await expect(stream.result()).rejects.toBe(mine);
  await expect(stream.result()).rejects.toBe(mine);
  await untilIdle(session);
});

test("an error in a progress callback that has cancelled its stream is the stream's", async () => {
  const mine = new RangeError("mine");
  const stream = session.generate(LONG, {
    onProgress: () => {
      stream.cancel();
      throw mine;
    },
  });
  await expect(read(stream)).rejects.toBe(mine);
  await expect(stream.result()).rejects.toBe(mine);
  await untilIdle(session);
});

test("a stream has one reader", async () => {
  const stream = session.generate(2);
  await read(stream);
  expect((await failure(kakeya.StateError, read(stream))).message).toContain("iterated already");
  await failure(kakeya.StateError, () => stream.details());
  expect((await stream.result()).tokenIds).toEqual(stream.tokenIds);
  expect(stream.isFinished).toBe(true);
});

test("a stream that was read by result cannot be iterated", async () => {
  const stream = session.generate(2);
  await stream.result();
  expect((await stream.result()).generatedTokens).toBe(2);
  expect((await failure(kakeya.StateError, read(stream))).message).toContain("nothing left");
});

test("result reads what an iteration left", async () => {
  const stream = session.generate(5);
  const first = await stream[Symbol.asyncIterator]().next();
  const result = await stream.result();
  expect(result.tokenIds[0]).toBe(first.value);
  expect(result.generatedTokens).toBe(5);
});

test("tokens that are asked for without waiting come in order", async () => {
  const stream = session.generate(4);
  const tokens = stream[Symbol.asyncIterator]();
  const asked = await Promise.all([tokens.next(), tokens.next(), tokens.next(), tokens.next(), tokens.next()]);
  expect(asked.map((each) => each.value as number | undefined)).toEqual([...stream.tokenIds, undefined]);
});

test("closing a session ends its stream as closed", async () => {
  const own = await client.createSession({ strategy: ENDLESS });
  await own.append(PROMPT);
  const began = resolvers();
  const reading = own.generate(LONG, { onProgress: began.resolve }).result();
  await began.promise;
  const outcome = failure(kakeya.SessionClosed, reading);
  await own.close();
  await outcome;
});

function resolvers(): { promise: Promise<void>; resolve: () => void } {
  let resolve = (): void => undefined;
  const promise = new Promise<void>((keep) => (resolve = keep));
  return { promise, resolve };
}
