/** A Generate read as text, from the real server: stop strings, whole characters, and where to go back to. */
import { afterAll, beforeAll, beforeEach, expect, inject, test } from "vitest";

import { failure, PROMPT } from "../testing/moves.js";
import * as kakeya from "./index.js";
import { ReplyText, StopStrings } from "./reply-text.js";
import type { ChatTokenizer } from "./tokenization.js";

type Decodes = Pick<ChatTokenizer, "decode">;

const SAID = "Well: naïve 😀.\nUser: me";
// Ids of the small vocabulary that stand for bytes above it.
const HIGH = new Map([...Buffer.from("ï😀")].map((byte, at) => [at + 1, byte]));
const IDS = new Map([...HIGH].map(([id, byte]) => [byte, id]));
const ENCODED = [...Buffer.from(SAID)].map((byte) => IDS.get(byte) ?? byte);

/** One id a byte. */
const bytes: Decodes = { decode: (ids) => Buffer.from(ids.map((id) => HIGH.get(id) ?? id)).toString("utf8") };

let client: kakeya.Client;
let session: kakeya.Session;
beforeAll(() => {
  client = new kakeya.Client(inject("target"));
});
beforeEach(async () => {
  session = await client.createSession({ eosTokenIds: [] });
  await session.append(PROMPT);
});
afterAll(async () => {
  await client.close();
});

/** A Generate whose tokens are known. */
function generating(of = session): kakeya.GenerateStream {
  return of.generate(64, { constraint: { kind: "choice", choices: [ENCODED] } });
}

async function pieces(text: kakeya.TextStream): Promise<string[]> {
  const found = [];
  for await (const piece of text) found.push(piece);
  return found;
}

test("text comes in whole characters, and the result has all of it", async () => {
  const stream = generating();
  expect(await pieces(stream.text(bytes))).toEqual(Array.from(SAID));
  const result = await generating()
    .text(bytes, { stop: ["nowhere"] })
    .result();
  expect(result).toMatchObject({ text: SAID, stop: undefined, tokenIds: ENCODED });
  expect([result.position, result.result?.historyLength]).toEqual([session.historyLength, session.historyLength]);
  await failure(kakeya.StateError, pieces(stream.text(bytes)));
});

test("a stop string ends the text, and a rewind takes it out of the history", async () => {
  for (const [stop, text, matched] of [
    [["\nUser:", "nowhere"], "Well: naïve 😀.", "\nUser:"],
    [["ïv", "ï"], "Well: na", "ï"],
    [["W"], "", "W"],
  ] as const) {
    const fork = await session.fork();
    expect((await pieces(generating(await fork.fork()).text(bytes, { stop }))).join("")).toBe(text);
    const result = await generating(fork).text(bytes, { stop }).result();
    const position = PROMPT.length + Buffer.byteLength(text);
    expect(result).toMatchObject({ text, stop: matched, result: undefined, position });
    expect((await fork.rewind(position)).historyLength).toBe(position);
  }
});

test("a stop string within the minimum of tokens does not count", async () => {
  const stream = session.generate(64, { constraint: { kind: "choice", choices: [ENCODED] }, minTokens: 2 });
  expect(await stream.text(bytes, { stop: ["e", "We"] }).result()).toMatchObject({ text: "Well: naïv", stop: "e" });
});

test("what waits for a stop string comes with the end", async () => {
  const found = await pieces(generating().text(bytes, { stop: [": me and you"] }));
  expect([found.join(""), found.at(-1)]).toEqual([SAID, ": me"]);
});

test("stops that are no texts are refused by name", async () => {
  const stream = session.generate(1);
  for (const stop of ["text", [""], [3]] as unknown as string[][]) {
    const refused = await failure(
      kakeya.InvalidArgument,
      Promise.resolve().then(() => stream.text(bytes, { stop })),
    );
    expect(refused.message).toContain("stop");
  }
  stream.cancel();
});

test("stop sequences end a Generate, and the result tells which did", async () => {
  const choice = { kind: "choice", choices: [ENCODED] } as const;
  const options = { constraint: choice, stopSequences: [[9, 9], [...Buffer.from("l:")]] };
  const result = await session.generate(64, options).result();
  expect(Buffer.from(result.tokenIds).toString()).toBe("Well:");
  expect(result).toMatchObject({ stopReason: "eos", stopSequence: 1, fitsConstraint: false });
});

test("bytes that are no text come out as they decode, and wait for three more at most", () => {
  let seed = 1;
  const plain: Decodes = { decode: (ids) => Buffer.from(ids).toString("utf8") };
  for (let run = 0; run < 50; run += 1) {
    const ids = Array.from({ length: 80 }, () => (seed = (seed * 48_271) % 2_147_483_647) % 256);
    const stream = new ReplyText((some) => plain.decode(some));
    let shown = "";
    for (const [at, id] of ids.entries()) {
      shown += stream.push(id);
      const whole = plain.decode(ids.slice(0, at + 1));
      expect(whole.startsWith(shown)).toBe(true);
      expect(whole.length - shown.length).toBeLessThanOrEqual(3);
    }
  }
});

test("a stop string ends the text wherever it is cut", () => {
  const stops = ["aab", "ab", "bba", "b".repeat(4)];
  for (let number = 0; number < 1 << 12; number += 1) {
    const text = Array.from(number.toString(2).padStart(12, "0"))
      .map((bit) => (bit === "0" ? "a" : "b"))
      .join("");
    const strings = new StopStrings(stops);
    const shown =
      Array.from(text)
        .map((one) => strings.push(one))
        .join("") + strings.end();
    const whole = new StopStrings(stops);
    expect(whole.push(text) + whole.end()).toBe(shown);
    expect(strings.matched === undefined ? text : shown + strings.matched).toBe(
      text.slice(0, shown.length + (strings.matched?.length ?? 0)),
    );
    expect(stops.some((stop) => shown.includes(stop))).toBe(false);
  }
});
