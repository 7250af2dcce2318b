/** What is done once, or reported, when connections are lost: a proxy that loses them before the real server. */
import { createServer } from "node:http";
import { type AddressInfo } from "node:net";

import { afterEach, beforeEach, expect, inject, test } from "vitest";

import { failure, PROMPT, read, untilIdle } from "../testing/moves.js";
import { Proxy } from "../testing/proxy.js";
import { drainServer, openServer } from "../testing/servers.js";
import * as kakeya from "./index.js";

const QUICK: kakeya.RetryPolicy = { attempts: 4, firstDelaySeconds: 0 };
let proxy: Proxy;
let client: kakeya.Client;

beforeEach(async () => {
  proxy = await Proxy.before(inject("target"));
  client = new kakeya.Client(proxy.target, { retry: QUICK });
});
afterEach(async () => {
  await client.close();
  await proxy.close();
});

test("a read survives a lost connection", async () => {
  await using session = await client.createSession();
  await session.append(PROMPT);
  for (const loss of ["request", "answer"] as const) {
    proxy.lose(loss);
    expect((await session.info()).historyLength).toBe(PROMPT.length);
  }
  expect(proxy.connections).toBe(3);
});

test("a server that is back after some attempts is found", async () => {
  proxy.refuse(3);
  expect((await client.serverInfo()).modelId).toBe("tiny");
});

test("after four attempts it is the caller's turn", async () => {
  // Of these one finds out, after the first attempt, whether the two sides disagree on TLS.
  proxy.refuse(5);
  const error = await failure(kakeya.ConnectionFailed, client.serverInfo());
  expect(error.message).toContain(proxy.target);
  expect(error.code).toBe("UNAVAILABLE");
  expect(error.reason).toBeUndefined();
  expect((await client.serverInfo()).modelId).toBe("tiny");
});

test("without retries the first loss is reported", async () => {
  await using single = new kakeya.Client(proxy.target, { retry: { attempts: 1 } });
  proxy.refuse(1);
  await failure(kakeya.ConnectionFailed, single.serverInfo());
});

test.each(["request", "answer"] as const)("an append whose %s was lost is in the history once", async (loss) => {
  await using session = await client.createSession();
  await session.append([1, 2]);
  proxy.lose(loss);
  expect(await session.append(PROMPT)).toBe(10);
  expect((await session.info()).historyLength).toBe(10);
});

test.each<["request" | "answer", number]>([
  ["request", 0],
  ["answer", 8],
])("an append whose %s was lost for good says how many of its ids arrived", async (loss, arrived) => {
  await using single = new kakeya.Client(proxy.target, { retry: { attempts: 1 } });
  await using own = await single.createSession();
  await own.append([1]);
  proxy.lose(loss);
  if (arrived === 0) {
    const error = await failure(kakeya.ConnectionFailed, own.append(PROMPT));
    expect(error.appendedTokens).toBe(0);
    expect(await own.append(PROMPT)).toBe(9);
  } else {
    expect(await own.append(PROMPT)).toBe(9);
  }
  expect((await own.info()).historyLength).toBe(9);
});

test("an append stopped by its signal leaves the next one to insist on the length known before", async () => {
  await using session = await client.createSession();
  await session.append([1]);
  const abort = new AbortController();
  const append = session.append(PROMPT, { signal: abort.signal });
  abort.abort(new Error("mine"));
  await expect(append).rejects.toThrow("mine");
  // Whether it arrived is open. In both cases nothing is in the history twice.
  const length = await session.append([2]).catch((error: unknown) => {
    expect(error).toBeInstanceOf(kakeya.HistoryLengthMismatch);
    return (error as kakeya.HistoryLengthMismatch).actual;
  });
  expect([2, 9]).toContain(length);
});

test("a session that was made, and whose answer was lost, is made once", async () => {
  // A client of its own: the counts are of all its connections.
  const { target } = await openServer(inject("control"), {});
  const lossy = await Proxy.before(target);
  await using alone = new kakeya.Client(lossy.target, { retry: QUICK });
  await alone.serverInfo();
  lossy.lose("answer");
  const session = await alone.createSession({ strategy: { kind: "sink_window", window: 64 } });
  expect(lossy.connections).toBe(2);
  expect((await alone.serverInfo()).kvReservedBytes).toBe(session.peakBytes);
  await session.close();
  await lossy.close();
});

test("a close whose answer was lost returns the final length", async () => {
  const session = await client.createSession();
  await session.append(PROMPT);
  proxy.lose("answer");
  expect(await session.close()).toBe(PROMPT.length);
});

test("a fork whose answer was lost is made once", async () => {
  await using session = await client.createSession();
  await session.append(PROMPT);
  proxy.lose("answer");
  await using fork = await session.fork();
  expect(fork.historyLength).toBe(PROMPT.length);
});

test("a rewind whose answer was lost is done once", async () => {
  await using session = await client.createSession();
  await session.append(PROMPT);
  proxy.lose("answer");
  await using rewound = await session.rewind(3);
  expect([rewound.historyLength, rewound.prefillTokens, session.isClosed]).toEqual([3, 3, true]);
  expect((await rewound.info()).historyLength).toBe(3);
  await failure(kakeya.SessionNotFound, client.session(session.id));
});

test.each([0, 1, 5])("a stream whose connection is lost after %i messages goes on where it stopped", async (count) => {
  await using reference = await client.createSession();
  await reference.append(PROMPT);
  const expected = await reference.generate(12, { temperature: 2, seed: 7 }).result();
  await using session = await client.createSession();
  await session.append(PROMPT);
  proxy.lose({ afterMessages: count });
  const stream = session.generate(12, { temperature: 2, seed: 7, logprobs: true });
  const ids = await read(stream);
  expect(ids).toEqual(expected.tokenIds);
  const result = await stream.result();
  expect([result.historyLength, result.generatedTokens, result.stopReason]).toEqual([20, 12, "max_tokens"]);
  expect(result.logprobs).toHaveLength(12);
  expect((await untilIdle(session)).historyLength).toBe(20);
});

test("a stream that cannot go on keeps what came, and says why", async () => {
  await using single = new kakeya.Client(proxy.target, { retry: { attempts: 1 } });
  const own = await single.createSession();
  await own.append(PROMPT);
  proxy.lose({ afterMessages: 3 });
  const stream = own.generate(12);
  await failure(kakeya.ConnectionFailed, stream.result());
  await failure(kakeya.ConnectionFailed, stream.result());
  const info = await untilIdle(own);
  expect(info.historyLength).toBeGreaterThanOrEqual(PROMPT.length + stream.tokenIds.length);
});

test("a server that drains refuses with the time to wait, and the error says so", async () => {
  const { target } = await openServer(inject("control"), { server: { drain_seconds: 5 } });
  await using own = new kakeya.Client(target, { retry: { attempts: 1 } });
  const session = await own.createSession({ strategy: { kind: "sink_window", window: 32 } });
  await session.append(PROMPT);
  const stream = session.generate(30_000);
  await stream[Symbol.asyncIterator]().next();
  const draining = drainServer(inject("control"), target);
  let refusal: unknown;
  while (refusal === undefined) {
    refusal = await own.createSession().then(
      () => undefined,
      (error: unknown) => error,
    );
  }
  stream.cancel();
  await draining;
  expect(refusal).toBeInstanceOf(kakeya.Draining);
  expect(refusal).toHaveProperty("retryAfterSeconds", 5);
});

test("an HTTP server in place of ours is named as such", async () => {
  const http = createServer((_, response) => response.end("hello"));
  await new Promise<void>((resolve) => http.listen(0, "127.0.0.1", resolve));
  try {
    const target = `127.0.0.1:${(http.address() as AddressInfo).port}`;
    await using client = new kakeya.Client(target, { retry: { attempts: 1 } });
    const error = await failure(kakeya.ConnectionFailed, client.serverInfo());
    expect(error.message).toContain("speaks no gRPC");
  } finally {
    http.close();
  }
});
