/** Tool calls: each family of tests/conformance/tools.json is found, held, read and answered as by the Python SDK. */
import { execFileSync } from "node:child_process";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { afterAll, beforeAll, describe, expect, test } from "vitest";

import { failure } from "../testing/moves.js";
import { PYTHON, ROOT } from "../testing/python.mjs";
import { InvalidArgument, InvalidMessages, InvalidTool, ToolCallError, ToolFormatUnknown } from "./index.js";
import { loadTokenizer, type ChatTokenizer, type Message } from "./tokenization.js";
import { Tools, toolFrom, type ToolCall, type ToolDefinition } from "./tools.js";

type Call = Pick<ToolCall, "arguments" | "name"> & { readonly id?: string };

interface Family {
  readonly template: string[];
  readonly format?: "code_block" | "hermes";
  readonly end: string;
  readonly spoof?: string;
  readonly turns: {
    readonly written: string;
    readonly text: string;
    readonly calls: Call[];
    readonly is_required?: boolean;
  }[];
  readonly appended: { readonly calls: Call[]; readonly results: string[]; readonly text: string };
}

interface Rendered {
  readonly format: Record<string, unknown>;
  readonly constraints: Record<string, string>;
  readonly chat: { readonly messages: Message[]; readonly ids: number[] };
}

const FILE = JSON.parse(readFileSync(join(ROOT, "tests", "conformance", "tools.json"), "utf8")) as {
  readonly tools: ToolDefinition[];
  readonly families: Record<string, Family>;
};

let folder: string;
let rendered: Record<string, Rendered>;
beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), "tool-families-"));
  const command = ["-m", "tests.conformance.tool_families", folder];
  rendered = JSON.parse(execFileSync(PYTHON, command, { cwd: ROOT, encoding: "utf8" })) as Record<string, Rendered>;
});
afterAll(() => {
  rmSync(folder, { recursive: true });
});

describe.each(Object.entries(FILE.families))("%s", (name, family) => {
  let tokenizer: ChatTokenizer;
  let tools: Tools;
  beforeAll(async () => {
    tokenizer = await loadTokenizer(join(folder, name));
    tools = new Tools(FILE.tools, tokenizer, { format: family.format });
  });

  test("the format, the constraints and the first ids are Python's", () => {
    const python = rendered[name];
    for (const [choice, grammar] of Object.entries(python?.constraints ?? {})) {
      expect(tools.constraint(choice)).toEqual({ kind: "lark", grammar });
    }
    for (const part of ["begin", "middle", "end"] as const) expect(tools.format[part]).toBe(python?.format[part]);
    expect(tools.format.between ?? null).toBe(python?.format["between"]);
    expect(tools.tokensForChat(python?.chat.messages ?? [])).toEqual(python?.chat.ids);
  });

  test("what is said and called is read token by token", async () => {
    for (const turn of family.turns) {
      const ids = tokenizer.encode(turn.written);
      const whole = tools.read(ids);
      expect(whole.text).toBe(turn.text);
      expect(whole.calls).toMatchObject(turn.calls);
      expect(whole.calls).toHaveLength(turn.calls.length);
      const written = turn.calls.map(() => "");
      let text = "";
      for await (const part of tools.parts(ids)) {
        if (part.kind === "text") text += part.text;
        else if (part.kind === "call_part") written[part.index] = `${written[part.index] ?? ""}${part.arguments}`;
      }
      expect(text.trim()).toBe(turn.text);
      expect(written.map((each) => JSON.parse(each) as unknown)).toEqual(turn.calls.map((call) => call.arguments));
    }
  });

  test("a marker that is a token is no marker when it is spelled", () => {
    if (family.spoof === undefined) return;
    const written = family.turns[1]?.written ?? "";
    const spelled = Array.from(written).flatMap((each) => tokenizer.encode(each));
    expect(tools.read(spelled)).toEqual({ text: written, calls: [] });
  });

  test("a call that is cut is an error", async () => {
    const ids = tokenizer.encode(family.turns[2]?.written ?? "");
    const error = await failure(ToolCallError, () => tools.read(ids.slice(0, ids.length / 2)));
    expect(error.message).toContain("maxTokens");
  });

  test("results are appended as the template has them", () => {
    const { calls: asked, results, text } = family.appended;
    const ids = tokenizer.encode(written(name, family, asked));
    const { calls } = tools.read(ids);
    expect(calls).toMatchObject(asked.map((call) => ({ name: call.name })));
    const answers = calls.map((call, at) => ({ call, content: results[at] ?? "" }));
    const expected = tokenizer.encode(text);
    expect(tools.tokensForNextTurn(answers, { after: ids })).toEqual(expected);
    if (!text.startsWith(family.end)) return;
    const ended = [...ids, ...tokenizer.encode(family.end)];
    expect(tools.tokensForNextTurn(answers, { after: ended })).toEqual(expected.slice(1));
  });
});

/** How the family writes these calls. */
function written(name: string, family: Family, calls: readonly Call[]): string {
  const one = (call: Call): string =>
    family.turns.find((turn) => turn.is_required && turn.calls.length === 1 && turn.calls[0]?.name === call.name)
      ?.written ?? "";
  if (name !== "mistral" || calls.length === 1) return calls.map(one).join("\n");
  const inner = calls.map((call, at) =>
    one(call)
      .slice("[TOOL_CALLS] [".length, -1)
      .replace(calls[0]?.id ?? "", calls[at]?.id ?? ""),
  );
  return `[TOOL_CALLS] [${inner.join(", ")}]`;
}

const ADD = {
  name: "add",
  description: "Add two numbers.",
  parameters: {
    toJSONSchema: () => ({ type: "object", properties: { a: { type: "number" }, b: { type: "number" } } }),
  },
  run: ({ a, b }: { a: number; b: number }): number => {
    if (b === 0) throw new RangeError("nothing to add");
    return a + b;
  },
};

test("a call runs the function, and what that throws is a result for the model", async () => {
  const tools = new Tools([ADD, { name: "search" }], await loadTokenizer(join(folder, "hermes")));
  const call = (b: number, name = "add"): ToolCall => ({ kind: "call", id: "a", name, arguments: { a: 1, b } });
  expect(await tools.call(call(2))).toEqual({ call: call(2), content: "3" });
  expect(await tools.call(call(0))).toEqual({ call: call(0), content: "RangeError: nothing to add", isError: true });
  await failure(InvalidTool, () => tools.call(call(1, "search")));
});

test("definitions of both APIs are tools, and what is none is refused by its path", async () => {
  const parameters = { type: "object", properties: { a: { type: "string" } } };
  const expected = { name: "f", description: "does", parameters };
  expect(toolFrom({ type: "function", function: expected })).toEqual(expected);
  expect(toolFrom({ name: "f", description: "does", input_schema: parameters })).toEqual(expected);
  for (const [given, path] of [
    [{ description: "nameless" }, "tool.name"],
    [{ name: "f", parameters: { type: "array" } }, "f.parameters"],
  ] as const) {
    expect((await failure(InvalidTool, () => toolFrom(given))).path).toBe(path);
  }
});

test("a template without calls is refused with the formats there are", async () => {
  const plain = await loadTokenizer(join(folder, "text markers"));
  const error = await failure(ToolFormatUnknown, () => new Tools([ADD], plain));
  expect(error.message).toMatch(/im_start.*hermes.*llama.*code_block/);
  await failure(InvalidArgument, () => new Tools([ADD], plain, { format: "xml" as "hermes" }));
  const tools = new Tools([ADD], plain, { format: "hermes" });
  const said = plain.decode(tools.tokensForChat([{ role: "user", content: "a" }]));
  expect(said).toContain("<|im_start|>system\nYou can call these functions:");
});

test("where a folder has a template for tools, that one is asked", async () => {
  const both = join(folder, "both");
  cpSync(join(folder, "hermes"), both, { recursive: true });
  const template = readFileSync(join(both, "chat_template.jinja"), "utf8");
  rmSync(join(both, "chat_template.jinja"));
  const path = join(both, "tokenizer_config.json");
  const plain = FILE.families["text markers"]?.template.join("\n");
  const chat_template = [
    { name: "default", template: plain },
    { name: "tool_use", template },
  ];
  writeFileSync(path, JSON.stringify({ ...(JSON.parse(readFileSync(path, "utf8")) as object), chat_template }));
  const tools = new Tools(FILE.tools, await loadTokenizer(both));
  const python = rendered["hermes"];
  expect(tools.constraint("auto").grammar).toBe(python?.constraints["auto"]);
  expect(tools.tokensForChat(python?.chat.messages ?? [])).toEqual(python?.chat.ids);
});

test("a choice is one of the tools, and every call has a result", async () => {
  const tokenizer = await loadTokenizer(join(folder, "hermes"));
  const tools = new Tools(FILE.tools, tokenizer);
  await failure(InvalidArgument, () => tools.constraint("subtract"));
  const after = tokenizer.encode(FILE.families["hermes"]?.turns.at(-1)?.written ?? "");
  const [call] = tools.read(after).calls;
  const results = call === undefined ? [] : [{ call, content: "done" }];
  await failure(InvalidMessages, () => tools.tokensForNextTurn(results, { after }));
});
