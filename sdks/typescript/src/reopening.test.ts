/** Sessions found again by their id or in a list, and histories read back, against the real server. */
import { afterEach, beforeEach, expect, inject, test } from "vitest";

import { failure, PROMPT } from "../testing/moves.js";
import { openServer } from "../testing/servers.js";
import * as kakeya from "./index.js";

let client: kakeya.Client;
beforeEach(() => {
  client = new kakeya.Client(inject("target"));
});
afterEach(async () => {
  await client.close();
});

async function collected<T>(items: AsyncIterable<T>): Promise<T[]> {
  const all: T[] = [];
  for await (const item of items) all.push(item);
  return all;
}

test("a session goes on where its id is known", async () => {
  const made = await client.createSession({ strategy: { kind: "sink_window", sink: 4, window: 32 }, label: "lost" });
  await made.append(PROMPT);
  const first = await made.generate(5).result();
  await using other = new kakeya.Client(inject("target"));
  const again = await other.session(made.id);
  for (const name of [
    "id",
    "strategy",
    "sustainedBytes",
    "peakBytes",
    "tierBytes",
    "limitTokens",
    "mode",
    "modelId",
    "durability",
    "historyLength",
  ] as const) {
    expect([name, again[name]]).toEqual([name, made[name]]);
  }
  expect(again.historyLength).toBe(13);
  expect(await again.append(PROMPT)).toBe(21);
  const second = await again.generate(5).result();
  const fork = await again.fork();
  expect(fork.id.split(".")[0]).toBe(made.id.split(".")[0]);
  const pieces = await collected(fork.history());
  expect(pieces.flatMap((piece) => piece.tokenIds)).toEqual([
    ...PROMPT,
    ...first.tokenIds,
    ...PROMPT,
    ...second.tokenIds,
  ]);
  expect(pieces.map((piece) => piece.runLengths)).toEqual([[8, 5, 8, 5]]);
  expect([await fork.close(), await again.close()]).toEqual([26, 26]);
  await failure(kakeya.SessionNotFound, other.session(made.id));
  expect(() => again.history()).toThrow(kakeya.SessionClosed);
});

test("a history comes in pieces of a bounded size, from any position", async () => {
  await using session = await client.createSession();
  expect(await collected(session.history())).toEqual([]);
  const ids = Array.from({ length: 50 }, (_, position) => (7 * position) % 128);
  await session.append(ids);
  ids.push(...(await session.generate(9).result()).tokenIds);
  for (const [firstPosition, pieceTokens] of [
    [0, 16_384],
    [0, 1],
    [13, 20],
    [58, 7],
    [59, 7],
  ] as const) {
    const pieces = await collected(session.history({ firstPosition, pieceTokens }));
    expect(pieces.flatMap((piece) => piece.tokenIds)).toEqual(ids.slice(firstPosition));
    let at = firstPosition;
    for (const piece of pieces) {
      expect([piece.firstPosition, piece.historyLength]).toEqual([at, 59]);
      expect(piece.tokenIds.length).toBeLessThanOrEqual(pieceTokens);
      expect(piece.runLengths.reduce((sum, each) => sum + each, 0)).toBe(piece.tokenIds.length);
      at += piece.tokenIds.length;
    }
  }
  const error = await failure(kakeya.InvalidArgument, collected(session.history({ firstPosition: 60 })));
  expect(error.field).toBe("first_position");
});

test.each([0, 16_385, 1.5])("sizes out of range are refused at once: %d", async (size) => {
  await using session = await client.createSession();
  expect(() => session.history({ pieceTokens: size })).toThrow(kakeya.InvalidArgument);
  expect(() => client.sessions({ pageSize: size })).toThrow(kakeya.InvalidArgument);
  await failure(kakeya.InvalidArgument, client.session(""));
});

test("an owner lists all sessions of its own", async () => {
  const { target } = await openServer(inject("control"), {});
  await using own = new kakeya.Client(target);
  const made: kakeya.Session[] = [];
  for (let number = 0; number < 7; number++) made.push(await own.createSession({ label: `turn ${number}` }));
  const busy = made[3] as kakeya.Session;
  await busy.append(PROMPT);
  await busy.generate(2).result();
  for (const pageSize of [1, 3, 7, 1000]) {
    const listed = await collected(own.sessions({ pageSize }));
    expect(new Map(listed.map(({ id, label }) => [id, label]))).toEqual(
      new Map(made.map(({ id }, number) => [id, `turn ${number}`])),
    );
    expect(listed).toHaveLength(7);
    expect(listed.find(({ id }) => id === busy.id)).toMatchObject({
      historyLength: 10,
      isResident: true,
      isGenerating: false,
      strategy: busy.strategy,
    });
  }
});
