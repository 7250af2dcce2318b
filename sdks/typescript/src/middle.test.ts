/** A middle that cuts, delays and holds calls, against the real server: what a caller gets is what a calm line gives. */
import { afterEach, beforeEach, expect, inject, test } from "vitest";

import { failure, PROMPT } from "../testing/moves.js";
import { openServer, Middle, type Fate } from "../testing/servers.js";
import * as kakeya from "./index.js";

// Connections are made anew at once, each time.
const STUBBORN: kakeya.RetryPolicy = { attempts: 20, firstDelaySeconds: 0.02, maxDelaySeconds: 0.1 };
const SAMPLED: kakeya.GenerateOptions = { temperature: 1.5, topP: 0.9, seed: 11 };
// HTTP/2's codes.
const [REFUSED, CANCEL, INTERNAL, CALM_DOWN] = [7, 8, 2, 11];
const PARTS = ["request", "answer", "headers", "done", "trailers"] as const;
const ENDS = ["cut", "close"] as const;
const FATES: Fate[] = [
  ...PARTS.flatMap((when) => ENDS.map((what): Fate => ({ when, what }))),
  ...[1, 2, 7].flatMap((messages) => ENDS.map((what): Fate => ({ when: "messages", messages, what }))),
  ...[REFUSED, CANCEL, INTERNAL, CALM_DOWN].map((code): Fate => ({ when: "request", what: "reset", code })),
  ...[CANCEL, INTERNAL].map((code): Fate => ({ when: "headers", what: "reset", code })),
  ...[1, 2, 7].map((messages): Fate => ({ when: "messages", messages, what: "reset", code: CANCEL })),
];

let middle: Middle;
let client: kakeya.Client;
let calm: kakeya.Client;
/** What a conversation over a calm line was, once there has been one. */
let calmly: unknown[] | undefined;
beforeEach(async () => {
  middle = await Middle.before(inject("control"), inject("target"));
  client = new kakeya.Client(middle.target, { retry: STUBBORN });
  calm = new kakeya.Client(inject("target"));
});
afterEach(async () => {
  await client.close();
  await calm.close();
});

/** Every call that changes something, and one that does not; `each` comes before each of them. */
async function conversation(on: kakeya.Client, each: () => Promise<void>): Promise<unknown[]> {
  const said: unknown[] = [];
  await each();
  const session = await on.createSession({ eosTokenIds: [127] });
  // The first append asks for the server's limits; of which nothing is wrong here.
  await session.append([1]);
  for (let turn = 0; turn < 2; turn++) {
    await each();
    said.push(await session.append(PROMPT));
    await each();
    const result = await session.generate(12, { logprobs: true, ...SAMPLED }).result();
    said.push([result.tokenIds, result.stopReason, result.historyLength, session.historyLength]);
  }
  await each();
  const fork = await session.fork();
  await each();
  said.push((await fork.info()).historyLength);
  for (const closed of [fork, session]) {
    await each();
    said.push(await closed.close());
  }
  return said;
}

test.each(FATES)("whatever becomes of its calls, a conversation is the calm one: %j", async (fate) => {
  calmly ??= await conversation(calm, () => Promise.resolve());
  expect(await conversation(client, () => middle.expect(fate))).toEqual(calmly);
  expect((await middle.passed()).acted).toBeGreaterThan(0);
});

test.each<Fate>([
  { when: "answer", what: "cut" },
  { when: "headers", what: "reset" },
])("a session whose answer was lost is made once: %j", async (fate) => {
  // A client of its own: the counts are of all its connections.
  const { target } = await openServer(inject("control"), {});
  const before = await Middle.before(inject("control"), target);
  await using alone = new kakeya.Client(before.target, { retry: STUBBORN });
  await alone.serverInfo();
  await before.expect(fate);
  const session = await alone.createSession({ strategy: { kind: "sink_window", window: 64 } });
  expect((await alone.serverInfo()).kvReservedBytes).toBe(session.peakBytes);
});

test.each(["done", "trailers"] as const)("an answer is complete once it is done, cut behind %s", async (when) => {
  const session = await client.createSession();
  await session.append(PROMPT);
  const { calls } = await middle.passed();
  await middle.expect({ when, what: "close" });
  const stream = session.generate(5);
  expect((await stream.result()).tokenIds).toHaveLength(5);
  expect(stream.isFinished).toBe(true);
  expect((await middle.passed()).calls).toBe(calls + 1);
});

test.each<[boolean, Fate]>([
  [false, { when: "headers", what: "cut" }],
  [true, { when: "headers", what: "cut" }],
  [true, { when: "messages", messages: 1, what: "close" }],
])("a stream that never gets to a token is tried four times, progress reported: %s, %j", async (reports, fate) => {
  await using impatient = new kakeya.Client(middle.target, { retry: { attempts: 4, firstDelaySeconds: 0.05 } });
  const session = await impatient.createSession();
  await session.append(PROMPT);
  const { calls } = await middle.passed();
  await middle.expect(...Array.from({ length: 200 }, () => fate));
  const seen: kakeya.Progress[] = [];
  const onProgress = reports ? (each: kakeya.Progress): void => void seen.push(each) : undefined;
  const stream = session.generate(5, { onProgress });
  await failure(kakeya.ConnectionFailed, stream.result());
  expect((await middle.passed()).calls - calls).toBe(4);
  expect(stream.tokenIds).toEqual([]);
});

test("an append that takes longer than its timeout is resolved by its id", async () => {
  const session = await client.createSession();
  await session.append([1]);
  await middle.expect({ when: "answer", what: "delay", seconds: 1 });
  expect(await session.append(PROMPT, { timeoutSeconds: 0.3 })).toBe(9);
  expect((await session.info()).historyLength).toBe(9);
});

test("without an answer a call ends with its deadline, and an append is unresolved", async () => {
  const session = await client.createSession();
  await session.append(PROMPT);
  await middle.darken();
  await failure(kakeya.DeadlineExceeded, session.info({ timeoutSeconds: 0.3 }));
  await failure(kakeya.DeadlineExceeded, session.generate(5, { timeoutSeconds: 0.3 }).result());
  const error = await failure(kakeya.AppendUnresolved, session.append([7, 8], { timeoutSeconds: 0.3 }));
  expect([error.appendedTokens, error.historyLength, error.pendingTokens]).toEqual([null, 8, 2]);
  expect(error.cause).toBeInstanceOf(kakeya.DeadlineExceeded);
});

test("what a dead connection holds goes on over another one within the default timeout", async () => {
  // Keepalive finds out that nothing comes any more. All at once, for that takes its time.
  const reference = await calm.createSession();
  await reference.append(PROMPT);
  const expected = (await reference.generate(12, SAMPLED).result()).tokenIds;
  const held = async <T>(fate: Fate, call: (session: kakeya.Session) => Promise<T>): Promise<[T, number]> => {
    const own = await Middle.before(inject("control"), inject("target"));
    await using alone = new kakeya.Client(own.target, { retry: STUBBORN });
    const session = await alone.createSession();
    await session.append(PROMPT);
    await own.expect(fate);
    const result = await call(session);
    const { historyLength } = await session.info();
    expect((await own.passed()).connections).toBe(2);
    return [result, historyLength];
  };
  const [cutShort, complete, answered, lost] = await Promise.all([
    held({ when: "messages", messages: 4, what: "hold" }, (session) => session.generate(12, SAMPLED).result()),
    held({ when: "done", what: "hold" }, (session) => session.generate(12, SAMPLED).result()),
    held({ when: "answer", what: "hold" }, (session) => session.append([7, 8])),
    held({ when: "request", what: "hold" }, (session) => session.append([7, 8])),
  ]);
  for (const [result, length] of [cutShort, complete]) {
    expect([result.tokenIds, length]).toEqual([expected, 20]);
  }
  expect([answered, lost]).toEqual([
    [10, 10],
    [10, 10],
  ]);
});
