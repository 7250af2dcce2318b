/**
 * An agent with two local tools that keeps one session for its whole conversation.
 *
 * Every turn appends only what is new: the question, then each tool's result. The model asks for a tool by writing a JSON
 * object; small models write it in many forms, so it is read leniently, and what cannot be used is reported to the
 * model.
 *
 *     npm install PACKAGE                                     # what `npm pack` makes in sdks/typescript
 *     npm install @huggingface/tokenizers @huggingface/jinja
 *     kakeya serve                                            # in another terminal
 *     kakeya models show smollm2-135m                         # prints the model's folder
 *     node tool-calling-agent.js FOLDER "What is 30 + 12?" [TARGET]
 */
import { pathToFileURL } from "node:url";

import { Client, KakeyaError, type Session } from "@kakeya/runtime";
import {
  endOfTurnIds,
  loadTokenizer,
  tokensForChat,
  tokensForNextTurn,
  type ChatTokenizer,
  type Message,
} from "@kakeya/runtime/tokenization";

const SYSTEM = `You answer with the help of tools. To use one, write only its JSON object:
{"tool": "add", "arguments": {"a": 2, "b": 3}}
{"tool": "count_words", "arguments": {"text": "three short words"}}
Once the tool has answered, answer the question in plain text.`;

// A small model follows an example better than an instruction.
const SHOWN: readonly Message[] = [
  { role: "user", content: "What is 20 + 7?" },
  { role: "assistant", content: '{"tool": "add", "arguments": {"a": 20, "b": 7}}' },
  { role: "user", content: "The tool answered: 27" },
  { role: "assistant", content: "20 + 7 is 27." },
  { role: "user", content: "How many words are in: red green blue" },
  { role: "assistant", content: '{"tool": "count_words", "arguments": {"text": "red green blue"}}' },
  { role: "user", content: "The tool answered: 3" },
  { role: "assistant", content: "There are 3 words." },
];

const MAX_TOKENS = 96;
const MAX_CALLS = 3;

export interface ToolCall {
  readonly tool: string;
  readonly values: Readonly<Record<string, unknown>>;
}

/** What the model says in one turn. */
export type Speak = (session: Session) => Promise<{ readonly words: string; readonly tokenIds: readonly number[] }>;

const TOOLS: Readonly<Record<string, (values: ToolCall["values"]) => string>> = {
  add: ({ a, b }) => String(numberOf(a, "a") + numberOf(b, "b")),
  count_words: ({ text }) => String(String(text).split(/\s+/).filter(Boolean).length),
};

function numberOf(value: unknown, name: string): number {
  const number = typeof value === "string" && value.trim() !== "" ? Number(value) : value;
  if (typeof number === "number" && Number.isFinite(number)) return number;
  throw new TypeError(`${name} must be a number, got ${JSON.stringify(value)}`);
}

/** The first JSON object in `text` that names a tool, wherever it stands and however it spells its keys. */
export function findToolCall(text: string): ToolCall | undefined {
  for (let start = text.indexOf("{"); start >= 0; start = text.indexOf("{", start + 1)) {
    const found = leadingObject(text.slice(start));
    const called = isObject(found?.["function"]) ? found["function"] : found;
    const tool = called?.["tool"] ?? called?.["name"] ?? called?.["function"];
    const given = called?.["arguments"] ?? called?.["parameters"] ?? called?.["args"] ?? {};
    const values = typeof given === "string" ? leadingObject(given) : given;
    if (typeof tool === "string") return { tool, values: isObject(values) ? values : {} };
  }
  return undefined;
}

/** The object that `text` begins with, if it is JSON. */
function leadingObject(text: string): Record<string, unknown> | undefined {
  for (let end = text.indexOf("}"); end >= 0; end = text.indexOf("}", end + 1)) {
    try {
      return JSON.parse(text.slice(0, end + 1)) as Record<string, unknown>;
    } catch {
      // Not yet its last brace.
    }
  }
  return undefined;
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** The tool's result, or what was wrong with the call: both are for the model to read. */
export function callTool(call: ToolCall): string {
  const tool = Object.hasOwn(TOOLS, call.tool) ? TOOLS[call.tool] : undefined;
  if (tool === undefined) return `there is no tool ${call.tool}; there are ${Object.keys(TOOLS).join(", ")}`;
  try {
    return tool(call.values);
  } catch (error) {
    return `the call failed: ${String(error)}`;
  }
}

/** One question, with as many tool calls as the model asks for, to a limit. Returns its last words. */
export async function answer(
  session: Session,
  tokenizer: ChatTokenizer,
  question: string,
  speak: Speak,
): Promise<string> {
  console.log(`user   ${question}`);
  const start: Message[] = [{ role: "system", content: SYSTEM }, ...SHOWN, { role: "user", content: question }];
  await session.append(tokensForChat(start, tokenizer));
  let said = await speak(session);
  for (let calls = 0; calls < MAX_CALLS; calls++) {
    const call = findToolCall(said.words);
    if (call === undefined) break;
    const result = callTool(call);
    console.log(`tool   ${call.tool} → ${result}`);
    // Every family's template knows the role "user"; few know "tool".
    const answer: Message[] = [{ role: "user", content: `The tool answered: ${result}` }];
    await session.append(tokensForNextTurn(answer, tokenizer, { after: said.tokenIds }));
    said = await speak(session);
  }
  return said.words;
}

/** Lets the model speak, and shows what it says and what that took. */
export function speaker(tokenizer: ChatTokenizer, maxTokens = MAX_TOKENS): Speak {
  return async (session) => {
    const result = await session.generate(maxTokens).result();
    const words = tokenizer.decode(result.tokenIds, { skipSpecialTokens: true }).trim();
    console.log(`model  ${words}`);
    const seconds = result.totalSeconds.toFixed(2);
    console.log(`       ${result.prefilledTokens} tokens read, ${result.generatedTokens} written in ${seconds} s`);
    return { words, tokenIds: result.tokenIds };
  };
}

export async function main(folder: string, question: string, target?: string): Promise<number> {
  try {
    const tokenizer = await loadTokenizer(folder);
    await using client = new Client(target);
    await using session = await client.createSession({ eosTokenIds: endOfTurnIds(tokenizer), label: "agent" });
    await answer(session, tokenizer, question, speaker(tokenizer));
    console.log(`       ${session.historyLength} tokens in the history`);
    return 0;
  } catch (error) {
    if (!(error instanceof KakeyaError)) throw error;
    console.log(`error  ${error.name}: ${error.message}`);
    return 1;
  }
}

if (import.meta.url === pathToFileURL(process.argv[1] ?? "").href) {
  const [, , folder = ".", question = "How many words are in: the quick brown fox?", target] = process.argv;
  process.exitCode = await main(folder, question, target);
}
