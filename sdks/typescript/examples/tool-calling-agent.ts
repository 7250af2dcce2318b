/**
 * An agent with two local tools that keeps one session for its whole conversation.
 *
 * Every turn appends only what is new: the question, then each tool's result. The first turn has to call a tool, in the
 * model's own format and with arguments that fit the schemas; later ones may. A call fits by construction: what generates
 * it can write nothing else.
 *
 *     npm install PACKAGE                                     # what `npm pack` makes in sdks/typescript
 *     npm install @huggingface/tokenizers @huggingface/jinja
 *     kakeya serve                                            # in another terminal
 *     node tool-calling-agent.js "What is 30 + 12?" [TARGET] [FOLDER]
 *
 * FOLDER has the tokenizer of a served model that this machine's caches lack.
 */
import { pathToFileURL } from "node:url";

import { Client, KakeyaError, ToolFormatUnknown, type Session } from "@kakeya/runtime";
import { endOfTurnIds, loadTokenizer, type ChatTokenizer, type Message } from "@kakeya/runtime/tokenization";
import { Tools, type ToolCall, type ToolResult } from "@kakeya/runtime/tools";

// A small model follows an example better than an instruction.
const SHOWN: readonly Message[] = [
  { role: "user", content: "What is 20 + 7?" },
  { role: "assistant", content: '<tool_call>\n{"name": "add", "arguments": {"a": 20, "b": 7}}\n</tool_call>' },
  { role: "user", content: "<tool_response>\n27\n</tool_response>" },
  { role: "assistant", content: "20 + 7 is 27." },
  { role: "user", content: "How many words are in: red green blue" },
  {
    role: "assistant",
    content: '<tool_call>\n{"name": "count_words", "arguments": {"text": "red green blue"}}\n</tool_call>',
  },
  { role: "user", content: "<tool_response>\n3\n</tool_response>" },
  { role: "assistant", content: "There are 3 words." },
];

const MAX_TOKENS = 96;
const MAX_CALLS = 3;

// Bounds keep a small model from writing on until it is cut.
const NUMBER = { type: "integer", minimum: -1_000_000, maximum: 1_000_000 };
const TEXT = { type: "string", maxLength: 120, description: "as it was given, without quotes" };

const TOOLS = [
  {
    name: "add",
    description: "Add two numbers.",
    parameters: { type: "object", properties: { a: NUMBER, b: NUMBER }, required: ["a", "b"] },
    run: ({ a, b }: { a: number; b: number }) => a + b,
  },
  {
    name: "count_words",
    description: "Count the words of a text.",
    parameters: { type: "object", properties: { text: TEXT }, required: ["text"] },
    run: ({ text }: { text: string }) => text.split(/\s+/).filter(Boolean).length,
  },
];

/** What the model says in one turn. */
export interface Said {
  readonly words: string;
  readonly calls: readonly ToolCall[];
  readonly tokenIds: readonly number[];
}

/** Lets the model speak: with a call at least, or as it likes. */
export type Speak = (session: Session, tools: Tools, choice: "auto" | "required") => Promise<Said>;

/** The tools, and what is shown of their use to a model whose template knows none. */
export function toolsFor(tokenizer: ChatTokenizer): { readonly tools: Tools; readonly shown: readonly Message[] } {
  try {
    return { tools: new Tools(TOOLS, tokenizer), shown: [] };
  } catch (error) {
    if (!(error instanceof ToolFormatUnknown)) throw error;
    return { tools: new Tools(TOOLS, tokenizer, { format: "hermes" }), shown: SHOWN };
  }
}

/** One question, with as many turns of tool calls as the model takes, to a limit. Returns its last words. */
export async function answer(
  session: Session,
  tokenizer: ChatTokenizer,
  question: string,
  speak: Speak,
): Promise<string> {
  console.log(`user   ${question}`);
  const { tools, shown } = toolsFor(tokenizer);
  await session.append(tools.tokensForChat([...shown, { role: "user", content: question }]));
  let said = await speak(session, tools, "required");
  for (let turns = 0; turns < MAX_CALLS && said.calls.length > 0; turns++) {
    const results: ToolResult[] = [];
    for (const call of said.calls) {
      const result = await tools.call(call);
      console.log(`tool   ${call.name} → ${result.content}`);
      results.push(result);
    }
    await session.append(tools.tokensForNextTurn(results, { after: said.tokenIds }));
    said = await speak(session, tools, "auto");
  }
  return said.words;
}

/** Lets the model speak, and shows what it says and what that took. */
export function speaker(maxTokens = MAX_TOKENS): Speak {
  return async (session, tools, choice) => {
    const stream = session.generate(maxTokens, { constraint: tools.constraint(choice) });
    let words = "";
    const calls: ToolCall[] = [];
    for await (const part of tools.parts(stream)) {
      if (part.kind === "text") words += part.text;
      else if (part.kind === "call") calls.push(part);
    }
    const result = await stream.result();
    words = words.trim();
    console.log(
      `model  ${words || calls.map(({ name, arguments: given }) => name + JSON.stringify(given)).join(", ")}`,
    );
    const seconds = result.totalSeconds.toFixed(2);
    console.log(`       ${result.prefilledTokens} tokens read, ${result.generatedTokens} written in ${seconds} s`);
    return { words, calls, tokenIds: result.tokenIds };
  };
}

export async function main(question: string, target?: string, folder?: string): Promise<number> {
  try {
    await using client = new Client(target);
    const tokenizer = folder === undefined ? await client.tokenizer(loadTokenizer) : await loadTokenizer(folder);
    await using session = await client.createSession({ eosTokenIds: endOfTurnIds(tokenizer), label: "agent" });
    await answer(session, tokenizer, question, speaker());
    console.log(`       ${session.historyLength} tokens in the history`);
    return 0;
  } catch (error) {
    if (!(error instanceof KakeyaError)) throw error;
    console.log(`error  ${error.name}: ${error.message}`);
    return 1;
  }
}

if (import.meta.url === pathToFileURL(process.argv[1] ?? "").href) {
  const [, , question = "How many words are in: the quick brown fox?", target, folder] = process.argv;
  process.exitCode = await main(question, target, folder);
}
