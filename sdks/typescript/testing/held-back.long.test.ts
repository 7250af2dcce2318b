/** A reader that does not read holds the server back, wherever tokens are buffered. */
import { expect, inject, test } from "vitest";

import { Client } from "../src/index.js";
import { ENDLESS, LONG, PROMPT, read, untilStill } from "./moves.js";

test("the server gets only so far ahead of a stream that is not read, and goes on when it is read", async () => {
  await using client = new Client(inject("target"));
  await using session = await client.createSession({ strategy: ENDLESS });
  await session.append(PROMPT);
  const stream = session.generate(LONG);
  const held = await untilStill(session);
  expect(held.isGenerating).toBe(true);
  const ahead = held.historyLength - PROMPT.length;
  expect(ahead).toBeLessThan(LONG);
  expect(await read(stream, ahead + 100)).toHaveLength(ahead + 100);
});
