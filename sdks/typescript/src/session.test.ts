/** Sessions against the real server on TinyModel. */
import { afterAll, beforeAll, expect, inject, test } from "vitest";

import { ENDLESS, failure, LONG, PROMPT, read, untilIdle } from "../testing/moves.js";
import { openServer } from "../testing/servers.js";
import * as kakeya from "./index.js";

let client: kakeya.Client;
beforeAll(() => {
  client = new kakeya.Client(inject("target"));
});
afterAll(async () => {
  await client.close();
});

async function endless(): Promise<kakeya.Session> {
  const session = await client.createSession({ strategy: ENDLESS });
  await session.append(PROMPT);
  return session;
}

test("a new session reports its settings and bounds", async () => {
  await using session = await client.createSession({
    strategy: { kind: "sink_window", sink: 2, window: 30 },
    label: "test",
  });
  expect(session.strategy).toEqual({ kind: "sink_window", sink: 2, window: 30 });
  expect(session.sustainedBytes).toBeGreaterThan(0);
  expect(session.peakBytes).toBeGreaterThanOrEqual(session.sustainedBytes);
  expect(session.limitTokens).toBeUndefined();
  expect(session.historyLength).toBe(0);
  expect(session.mode).toBe("batched");
  expect(session.modelId).toBe("tiny");
});

test("a full session has a limit, and a smaller one reserves less", async () => {
  await using whole = await client.createSession({ strategy: { kind: "full" } });
  await using small = await client.createSession({ strategy: { kind: "full" }, limitTokens: 64 });
  expect([whole.limitTokens, small.limitTokens]).toEqual([512, 64]);
  expect(small.peakBytes).toBeLessThan(whole.peakBytes);
});

test("histories are counted, and their caps are typed errors", async () => {
  const caps = { history_tokens_per_session: 30, history_tokens_per_owner: 50 };
  const { target } = await openServer(inject("control"), { engine: caps });
  await using alone = new kakeya.Client(target);
  const [one, other] = [
    await alone.createSession({ strategy: ENDLESS }),
    await alone.createSession({ strategy: ENDLESS }),
  ];
  for (let turn = 0; turn < 3; turn++) await one.append(PROMPT);
  const info = await alone.serverInfo();
  expect([info.historyTokensPerSession, info.historyTokensPerOwner, info.historyTokens]).toEqual([30, 50, 24]);
  expect((await one.info()).historyBytes).toBeGreaterThan((await other.info()).historyBytes);
  expect((await failure(kakeya.HistoryLimit, one.append(PROMPT))).message).toContain("history_tokens_per_session");
  for (let turn = 0; turn < 3; turn++) await other.append(PROMPT);
  expect((await failure(kakeya.QuotaExceeded, one.append(PROMPT.slice(0, 3)))).quota).toBe("history_tokens_per_owner");
  await failure(kakeya.QuotaExceeded, one.fork());
  await other.close();
  expect(await one.append(PROMPT.slice(0, 3))).toBe(27);
});

test("server info has the model and the limits", async () => {
  const info = await client.serverInfo();
  expect([info.modelId, info.vocabSize, info.trainedPositions]).toEqual(["tiny", 128, 512]);
  expect(info.strategies).toEqual(expect.arrayContaining(["full", "sink_window", "layer_window"]));
  expect(info.defaultStrategy).toEqual({ kind: "full" });
  expect(info.maxAppendTokens).toBe(40);
});

test("iterating and result agree, and the history grows by what was generated", async () => {
  await using one = await client.createSession();
  await using other = await client.createSession();
  for (const session of [one, other]) expect(await session.append(PROMPT)).toBe(PROMPT.length);
  const iterated = await read(one.generate(10));
  const result = await other.generate(10).result();
  expect(iterated).toEqual(result.tokenIds);
  expect(result.stopReason).toBe("max_tokens");
  expect(result.generatedTokens).toBe(10);
  expect([result.historyLength, one.historyLength, other.historyLength]).toEqual([18, 18, 18]);
  expect(result.prefilledTokens + result.cachedTokens).toBeGreaterThanOrEqual(PROMPT.length);
  expect((await one.info()).historyLength).toBe(18);
});

test("details have absolute positions and logprobs", async () => {
  await using session = await client.createSession();
  await session.append(PROMPT);
  const stream = session.generate(5, { logprobs: true });
  const details: kakeya.TokenDetail[] = [];
  for await (const detail of stream.details()) details.push(detail);
  expect(details.map((detail) => detail.position)).toEqual([8, 9, 10, 11, 12]);
  expect(details.every((detail) => detail.logprob !== undefined && detail.logprob <= 0)).toBe(true);
  const result = await stream.result();
  expect(result.logprobs).toEqual(details.map((detail) => detail.logprob));
  expect(result.tokenIds).toEqual(details.map((detail) => detail.tokenId));
});

test("progress is reported before the first token", async () => {
  await using session = await client.createSession();
  await session.append([...PROMPT, ...PROMPT, ...PROMPT]);
  const reports: kakeya.Progress[] = [];
  await session.generate(2, { onProgress: (progress) => reports.push(progress) }).result();
  expect(reports[0]?.doneTokens).toBe(0);
  expect(reports.at(-1)?.doneTokens).toBe(reports.at(-1)?.totalTokens);
});

test("the same seed gives the same tokens, all 64 bits of it, and a drawn seed is reported", async () => {
  async function sample(seed?: number | bigint): Promise<kakeya.GenerateResult> {
    await using session = await client.createSession();
    await session.append(PROMPT);
    return await session.generate(12, { temperature: 2, seed }).result();
  }
  const first = await sample();
  const again = await sample(first.seed);
  expect([again.tokenIds, again.seed]).toEqual([first.tokenIds, first.seed]);
  const [largest, next] = [await sample(2n ** 64n - 1n), await sample(2n ** 64n - 2n)];
  expect(largest.seed).toBe(2n ** 64n - 1n);
  expect(next.tokenIds).not.toEqual(largest.tokenIds);
});

test("a stop id is emitted and ends the stream", async () => {
  await using session = await client.createSession();
  await session.append(PROMPT);
  const free = await session.generate(8).result();
  const stop = free.tokenIds[3] ?? 0;
  await using other = await client.createSession();
  await other.append(PROMPT);
  const stopped = await other.generate(8, { stopTokenIds: [stop] }).result();
  expect(stopped.stopReason).toBe("eos");
  expect(stopped.tokenIds).toEqual(free.tokenIds.slice(0, free.tokenIds.indexOf(stop) + 1));
});

test("an id that is pushed far down is not generated", async () => {
  await using session = await client.createSession();
  await session.append(PROMPT);
  const [first = 0] = (await session.generate(1).result()).tokenIds;
  await using other = await client.createSession();
  await other.append(PROMPT);
  const result = await other.generate(1, { logitBias: new Map([[first, -1000]]) }).result();
  expect(result.tokenIds).not.toContain(first);
});

test("a long append is split and arrives whole", async () => {
  const ids = Uint32Array.from({ length: 123 }, (_, n) => (n * 7) % 128); // four requests of at most 40
  await using session = await client.createSession();
  expect(await session.append(ids)).toBe(123);
  await using byHand = await client.createSession();
  for (let start = 0; start < 123; start += 40) await byHand.append(ids.subarray(start, start + 40));
  expect((await session.generate(6).result()).tokenIds).toEqual((await byHand.generate(6).result()).tokenIds);
});

test("a long append that meets a bad id says how many arrived", async () => {
  await using session = await client.createSession();
  const ids = new Array<number>(100).fill(1);
  ids[90] = 128; // just outside the vocabulary, in the third request
  const error = await failure(kakeya.TokenOutOfRange, session.append(ids));
  expect(error.appendedTokens).toBe(80);
  expect(session.historyLength).toBe(80);
  expect(await session.append(ids.slice(80, 90))).toBe(90);
});

test("an append past the limit says how many arrived", async () => {
  await using session = await client.createSession({ limitTokens: 64 });
  const error = await failure(kakeya.HistoryLimit, session.append(new Array<number>(100).fill(1)));
  expect([error.appendedTokens, error.limitTokens, error.historyLength]).toEqual([40, 64, 40]);
  expect((await session.info()).historyLength).toBe(40);
});

test("a wrong expected length changes nothing", async () => {
  await using session = await client.createSession();
  await session.append(PROMPT);
  const error = await failure(kakeya.HistoryLengthMismatch, session.append([1], { expectedHistoryLength: 3 }));
  expect([error.expected, error.actual, error.appendedTokens]).toEqual([3, 8, 0]);
  await failure(kakeya.HistoryLengthMismatch, session.generate(1, { expectedHistoryLength: 3 }).result());
  expect((await session.info()).historyLength).toBe(8);
});

test("a fork goes on from where its session is, and neither disturbs the other", async () => {
  await using session = await client.createSession({ strategy: ENDLESS });
  await session.append(PROMPT);
  await session.generate(4).result();
  await using fork = await session.fork({ label: "aside" });
  expect([fork.historyLength, fork.strategy, fork.modelId]).toEqual([12, session.strategy, "tiny"]);
  expect(fork.id).not.toBe(session.id);
  await fork.append([1, 2]);
  const said = await fork.generate(6).result();
  expect((await session.info()).historyLength).toBe(12);
  await session.append([1, 2]);
  expect((await session.generate(6).result()).tokenIds).toEqual(said.tokenIds);
});

test("a fork of a history that is longer than expected is not made", async () => {
  await using session = await client.createSession();
  await session.append(PROMPT);
  const error = await failure(kakeya.HistoryLengthMismatch, session.fork({ expectedHistoryLength: 3 }));
  expect(error.actual).toBe(8);
});

test("reaching the limit ends a Generate as truncated", async () => {
  await using session = await client.createSession({ limitTokens: 20 });
  await session.append(PROMPT);
  const result = await session.generate(100).result();
  expect([result.stopReason, result.historyLength]).toEqual(["truncated", 20]);
});

test("closing is final, and closing again does nothing more", async () => {
  const session = await client.createSession();
  await session.append(PROMPT);
  expect([await session.close(), await session.close()]).toEqual([8, 8]);
  expect(session.isClosed).toBe(true);
  await failure(kakeya.SessionClosed, session.append([1]));
  await failure(kakeya.SessionClosed, () => session.generate(1));
  await failure(kakeya.SessionClosed, session.info());
});

test("leaving its block closes a session", async () => {
  let kept: kakeya.Session;
  {
    await using session = await client.createSession();
    kept = session;
  }
  expect(kept.isClosed).toBe(true);
});

test("a session that is busy is worth a retry", async () => {
  await using session = await endless();
  const stream = session.generate(LONG);
  const error = await failure(kakeya.SessionBusy, session.append([1]));
  expect(error).toBeInstanceOf(kakeya.RetryableError);
  expect(error.appendedTokens).toBe(0);
  stream.cancel();
  expect(await session.append([1])).toBe(session.historyLength);
});

test("a call during an append is refused with the advice to await it", async () => {
  await using session = await client.createSession();
  const append = session.append(PROMPT);
  await failure(kakeya.StateError, session.append([1]));
  await failure(kakeya.StateError, () => session.generate(1));
  expect(await append).toBe(8);
  expect((await session.info()).historyLength).toBe(8);
});

test("what the server refuses names the field", async () => {
  await using session = await client.createSession();
  await session.append(PROMPT);
  const refused: [string, number, kakeya.GenerateOptions][] = [
    ["temperature", 1, { temperature: -1 }],
    ["top_p", 1, { topP: 0 }],
    ["repetition_penalty", 1, { repetitionPenalty: 0 }],
    ["max_tokens", 0, {}],
  ];
  for (const [field, maxTokens, options] of refused) {
    const error = await failure(kakeya.InvalidArgument, session.generate(maxTokens, options).result());
    expect([error.field, error.reason, error.code]).toEqual([field, "INVALID_ARGUMENT", "INVALID_ARGUMENT"]);
  }
});

test("a layer that the model does not have is refused by the field's name", async () => {
  const strategy: kakeya.Strategy = { kind: "layer_window", fullLayers: [2, 7], window: 30 };
  const error = await failure(kakeya.InvalidArgument, client.createSession({ strategy }));
  expect(error.field).toBe("strategy.layer_window.full_layers");
});

test("a deadline ends the call and keeps the session", async () => {
  await using session = await endless();
  const stream = session.generate(LONG, { timeoutSeconds: 0.2 });
  await failure(kakeya.DeadlineExceeded, stream.result());
  await failure(kakeya.DeadlineExceeded, stream.result());
  const info = await untilIdle(session);
  expect(info.historyLength).toBeGreaterThanOrEqual(PROMPT.length + stream.tokenIds.length);
  expect(await session.append([1])).toBe(info.historyLength + 1);
});

test("a client that is closed during a call says so", async () => {
  const own = new kakeya.Client(inject("target"));
  const session = await own.createSession({ strategy: ENDLESS });
  await session.append(PROMPT);
  const reading = session.generate(LONG).result();
  void own.close();
  expect((await failure(kakeya.StateError, reading)).message).toContain("closed while");
  expect((await failure(kakeya.StateError, session.info())).message).toContain("is closed");
});
