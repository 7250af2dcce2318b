/** What would not survive the wire is refused before it, with its place and value. */
import { expect, inject, test } from "vitest";

import { failure } from "../testing/moves.js";
import { exact, tokenIdsOf, uint64Of, type TokenIds } from "./checks.js";
import * as kakeya from "./index.js";
import { endOfTurnIds, tokensForChat, tokensForNextTurn, type ChatTokenizer } from "./tokenization.js";

test.each<[string, unknown, string]>([
  ["negative", [1, -1], "tokenIds[1] must be in [0, 4294967295], got -1"],
  ["fractional", [0, 1, 1.5], "tokenIds[2] must be an integer, got 1.5"],
  ["too large", [2 ** 32], "tokenIds[0] must be in [0, 4294967295], got 4294967296"],
  ["not a number", [NaN], "tokenIds[0] must be an integer, got NaN"],
  ["a large bigint", [2n ** 64n], "tokenIds[0] must be in [0, 4294967295], got 18446744073709551616n"],
  ["a boolean", [true], "tokenIds[0] must be an integer, got true (boolean)"],
  ["text in it", ["7"], 'tokenIds[0] must be an integer, got "7"'],
  ["nested", [[1]], "tokenIds[0] must be an integer, got an array"],
])("an id that is %s is refused with its place and value", async (_, ids, message) => {
  const error = await failure(kakeya.InvalidTokenIds, () => tokenIdsOf(ids as TokenIds, "tokenIds"));
  expect(error.message).toBe(message);
  expect(error.field).toBe("token_ids");
  expect(error.value).toBe((ids as unknown[])[error.index ?? -1]);
});

test.each([["text"], [7], [null], [undefined]])("%s is no sequence of ids", async (ids) => {
  const error = await failure(kakeya.InvalidTokenIds, () => tokenIdsOf(ids as unknown as TokenIds, "tokenIds"));
  expect(error.message).toContain("must be a sequence of integers");
  expect(error.index).toBeUndefined();
});

test("ids of any origin are taken", () => {
  const origins: TokenIds[] = [[0, 4294967295], Uint32Array.of(0, 4294967295), BigInt64Array.of(0n, 4294967295n)];
  for (const ids of origins) expect(tokenIdsOf(ids, "tokenIds")).toEqual([0, 4294967295]);
  expect(tokenIdsOf(new Set([5, 6]), "tokenIds")).toEqual([5, 6]);
});

test("a 64-bit number is exact or it is refused", async () => {
  expect(uint64Of(2n ** 64n - 1n, "seed")).toBe(18446744073709551615n);
  expect(uint64Of(Number.MAX_SAFE_INTEGER, "seed")).toBe(9007199254740991n);
  const error = await failure(kakeya.InvalidArgument, () => uint64Of(2 ** 53, "seed"));
  expect(error.message).toContain("write it as a bigint");
  expect(exact(2n ** 53n - 1n, "length")).toBe(9007199254740991);
  await failure(kakeya.ProtocolError, () => exact(2n ** 53n, "length"));
});

test("an argument that protobuf would take wrongly is refused by name, and nothing is sent", async () => {
  await using client = new kakeya.Client(inject("target"));
  await using session = await client.createSession();
  const refused: [string, Record<string, unknown>][] = [
    ["temperature", { temperature: NaN }],
    ["top_p", { topP: Infinity }],
    ["min_p", { minP: 1e300 }],
    ["max_tokens", { maxTokens: 2 ** 32 }],
    ["max_tokens", { maxTokens: 1.5 }],
    ["seed", { seed: -1 }],
    ["seed", { seed: 2n ** 64n }],
    ["seed", { seed: 0.5 }],
    ["top_k", { topK: "7" }],
    ["logit_bias[1]", { logitBias: new Map([[1, Infinity]]) }],
    ["logit_bias", { logitBias: new Map([[-1, 1]]) }],
    ["stop_token_ids", { stopTokenIds: [2 ** 32] }],
    ["timeout_seconds", { timeoutSeconds: 0 }],
    ["timeout_seconds", { timeoutSeconds: 1e9 }],
    ["expected_history_length", { expectedHistoryLength: -1 }],
  ];
  for (const [field, { maxTokens, ...options }] of refused) {
    const error = await failure(kakeya.InvalidArgument, () =>
      session.generate((maxTokens ?? 1) as number, options as kakeya.GenerateOptions),
    );
    expect(error.field).toBe(field);
  }
  await failure(kakeya.InvalidTokenIds, session.append([1, -1]));
  await failure(kakeya.InvalidArgument, client.createSession({ limitTokens: -1 }));
  await failure(kakeya.InvalidTokenIds, client.createSession({ eosTokenIds: [0.5] }));
  const info = await session.info();
  expect([info.historyLength, info.isGenerating]).toEqual([0, false]);
});

test.each<[string, unknown]>([
  ["target", "nowhere"],
  ["target", "host:99999"],
  ["target", "http://host:1"],
  ["target", "host"],
  ["target", 7],
])("a %s that is no address is refused: %s", async (field, target) => {
  const error = await failure(kakeya.InvalidArgument, () => new kakeya.Client(target as string));
  expect(error.field).toBe(field);
});

test.each(["secret\n", "\tsecret"])(
  "a key with the line break of its file is named, and not shown: %j",
  async (apiKey) => {
    const { message } = await failure(kakeya.InvalidArgument, () => new kakeya.Client("127.0.0.1:1", { apiKey }));
    expect(message).toContain("apiKey.trim()");
    expect(message).not.toContain("secret");
  },
);

test("a strategy that is a name alone is refused with the kinds there are", async () => {
  await using client = new kakeya.Client(inject("target"));
  for (const strategy of ["sink_window", "nonsense", {}] as unknown[]) {
    const refused = client.createSession({ strategy: strategy as kakeya.Strategy });
    expect((await failure(kakeya.InvalidArgument, refused)).message).toContain("an object whose kind is one of full, ");
  }
});

test("settings that make no sense are refused by name", async () => {
  const refused: [string, kakeya.ClientOptions][] = [
    ["timeout_seconds", { timeoutSeconds: -1 }],
    ["generate_timeout_seconds", { generateTimeoutSeconds: NaN }],
    ["attempts", { retry: { attempts: 0 } }],
    ["first_delay_seconds", { retry: { firstDelaySeconds: -1 } }],
    // A timer of JavaScript's that is longer ends at once.
    ["first_delay_seconds", { retry: { firstDelaySeconds: 1e6 } }],
    ["max_delay_seconds", { retry: { maxDelaySeconds: 3e6 } }],
    ["tls", { tls: { certificate: "a.pem" } }],
    ["api_key", { apiKey: "line\nbreak" }],
  ];
  for (const [field, options] of refused) {
    const error = await failure(kakeya.InvalidArgument, () => new kakeya.Client("127.0.0.1:1", options));
    expect(error.field).toBe(field);
  }
});

test("what is neither true nor false is refused by name, and never taken for one of them", async () => {
  await using client = new kakeya.Client(inject("target"));
  await using session = await client.createSession();
  for (const name of ["logprobs", "drafting"]) {
    for (const value of ["yes", "false", 0]) {
      const error = await failure(kakeya.InvalidArgument, () => session.generate(1, { [name]: value }));
      expect(error.field).toBe(name);
    }
  }
});

test("an option of another name is an error, wherever it is given, and the error lists those there are", async () => {
  const stray = { stratgy: { kind: "full" }, retry: { attempts: 1 } };
  const unknown = await failure(kakeya.InvalidArgument, () => new kakeya.Client("127.0.0.1:1", stray));
  expect(unknown.message).toBe(
    "stratgy is not an option of Client; those are apiKey, tls, timeoutSeconds, generateTimeoutSeconds, retry",
  );
  expect(unknown.field).toBe("stratgy");
  for (const options of [{ retry: { attempt: 1 } }, { tls: { ca: "a.pem" } }] as object[]) {
    await failure(kakeya.InvalidArgument, () => new kakeya.Client("127.0.0.1:1", options));
  }
  await using client = new kakeya.Client(inject("target"));
  await using session = await client.createSession();
  const wrong = { maxTokens: 7, timeout: 1 } as object;
  await failure(kakeya.InvalidArgument, client.createSession({ limit: 7 } as object));
  await failure(kakeya.InvalidArgument, client.serverInfo(wrong));
  await failure(kakeya.InvalidArgument, () => session.generate(1, wrong));
  await failure(kakeya.InvalidArgument, session.append([1], wrong));
  await failure(kakeya.InvalidArgument, session.fork(wrong));
  await failure(kakeya.InvalidArgument, session.info(wrong));
  await failure(kakeya.InvalidArgument, session.close(wrong));
  await failure(kakeya.InvalidArgument, () => session.generate(1, null as unknown as object));
  const tokenizer: ChatTokenizer = {
    eosTokenIds: [],
    addedTokens: [],
    render: () => "",
    encode: () => [],
    decode: () => "",
  };
  await failure(kakeya.InvalidArgument, () => tokensForChat([{ role: "user" }], tokenizer, { tool: [] } as object));
  const next = { after: [], enableThinking: true } as { after: number[] };
  await failure(kakeya.InvalidArgument, () => tokensForNextTurn([{ role: "user" }], tokenizer, next));
  await failure(kakeya.InvalidArgument, () => endOfTurnIds(tokenizer, wrong));
  const info = await session.info();
  expect([info.historyLength, info.isGenerating]).toEqual([0, false]);
});
