/** The examples run, end to end, against the real server. */
import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { afterAll, beforeAll, beforeEach, expect, inject, test, vi } from "vitest";

import { PYTHON, ROOT } from "../testing/python.mjs";
import { openServer } from "../testing/servers.js";
import { Client } from "../src/index.js";
import { loadTokenizer } from "../src/tokenization.js";
import { answer, main, speaker, type Speak } from "./tool-calling-agent.js";

let roomy: string;
let folder: string;
let printed: string[];
beforeAll(async () => {
  // Without a length limit: an agent's prompt has more characters than TinyModel was trained for.
  ({ target: roomy } = await openServer(inject("control"), { engine: { strategy: "sink_window:sink=4,window=64" } }));
  folder = mkdtempSync(join(tmpdir(), "tokenizers-"));
  execFileSync(PYTHON, ["-m", "tests.conformance.save_tokenizers", folder], { cwd: ROOT });
});
beforeEach(() => {
  printed = [];
  const log = vi.spyOn(console, "log").mockImplementation((line: string) => printed.push(line));
  return () => {
    log.mockRestore();
  };
});
afterAll(() => {
  rmSync(folder, { recursive: true });
});

test("the minimal session prints what it generated", async () => {
  let written = "";
  const write = vi.spyOn(process.stdout, "write").mockImplementation((text) => (written += String(text)) !== "");
  process.argv[2] = inject("target");
  await import("./minimal-session.js");
  write.mockRestore();
  expect(written.trim().split(" ")).toHaveLength(16);
  expect(printed.at(-1)).toContain("22 tokens in the history, at most ");
});

test("the agent holds a conversation, whatever the model says", async () => {
  const tokenizer = await loadTokenizer(join(folder, "ChatML"));
  await using client = new Client(roomy);
  await using session = await client.createSession();
  await answer(session, tokenizer, "What is 2 + 3?", speaker(8));
  expect(printed[0]).toBe("user   What is 2 + 3?");
  expect(printed.join("\n")).toContain("8 written");
});

test("the agent feeds tool results back", async () => {
  // TinyModel asks for no tool by itself, so its words are put into its mouth; everything else is real.
  const says = ['<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>', "It is 5."];
  const tokenizer = await loadTokenizer(join(folder, "ChatML"));
  const speak: Speak = async (session, tools) => {
    await session.generate(4).result();
    const tokenIds = tokenizer.encode(says.shift() ?? "");
    const { text, calls } = tools.read(tokenIds);
    return { words: text, calls, tokenIds };
  };
  await using client = new Client(roomy);
  await using session = await client.createSession();
  expect(await answer(session, tokenizer, "What is 2 + 3?", speak)).toBe("It is 5.");
  expect(printed).toContain("tool   add → 5");
});

test("the agent reports that no server answers", async () => {
  expect(await main("Hello?", "127.0.0.1:1", join(folder, "ChatML"))).toBe(1);
  expect(printed.join("\n")).toContain("ConnectionFailed: no connection to 127.0.0.1:1");
});
