/** A budget for thinking, against the real server: what is in the history is exactly what was said and put in. */
import { afterAll, beforeAll, expect, inject, test } from "vitest";

import { failure, PROMPT } from "../testing/moves.js";
import * as kakeya from "./index.js";

let client: kakeya.Client;
beforeAll(() => {
  client = new kakeya.Client(inject("target"));
});
afterAll(async () => {
  await client.close();
});

async function opened(): Promise<kakeya.Session> {
  const session = await client.createSession({ eosTokenIds: [] });
  await session.append(PROMPT);
  return session;
}

test("a budget ends the thinking, and the answer goes on from there", async () => {
  const sampling = { temperature: 1, seed: 5n };
  const plain = (await (await opened()).generate(12, sampling).result()).tokenIds;
  for (const [budget, endTokenIds, thinking, appended] of [
    [12, plain.slice(3, 6), plain.slice(0, 6), []],
    [6, [7, 8], plain.slice(0, 6), [7, 8]],
    [6, [...plain.slice(4, 6), 9], plain.slice(0, 6), [9]],
  ] as const) {
    const session = await opened();
    const thought = await session.generateThinking(budget, 4, { endTokenIds, ...sampling });
    const answer = await thought.answer?.result();
    expect([thought.thinking.tokenIds, thought.appendedIds]).toEqual([thinking, appended]);
    const history: number[] = [];
    for await (const piece of session.history()) history.push(...piece.tokenIds);
    expect(history).toEqual([...PROMPT, ...thinking, ...appended, ...(answer?.tokenIds ?? [])]);
    expect([answer?.seed, answer?.generatedTokens]).toEqual([5n, 4]);
  }
});

test("a turn that ends while thinking has no answer", async () => {
  const [first = 0] = (await (await opened()).generate(1).result()).tokenIds;
  const session = await opened();
  const over = await session.generateThinking(6, 4, { endTokenIds: [7, 8], stopTokenIds: [first] });
  expect([over.answer, over.thinking.tokenIds, over.appendedIds]).toEqual([undefined, [first], []]);
  const refused = await failure(kakeya.InvalidArgument, session.generateThinking(6, 4, { endTokenIds: [] }));
  expect(refused.message).toContain("endTokenIds");
});
