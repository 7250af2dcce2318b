/**
 * Chat messages to token ids, on the client's side, in the one way that fits a history that only grows.
 *
 * A chat template renders a whole conversation. Rendered again one turn later, earlier turns can come out differently:
 * reasoning is stripped, whitespace trimmed, tool calls re-ordered; and text the model wrote, encoded again, need not
 * give the ids it sampled. A session keeps what was really said. So a conversation is rendered once, when it starts, and
 * from then on only what is new is appended:
 *
 *     await session.append(tokensForChat([system, user], tokenizer));
 *     const turn = await session.generate(256).result();
 *     await session.append(tokensForNextTurn([user], tokenizer, { after: turn.tokenIds }));
 *
 * The second function finds what is new by rendering `user, assistant, <the new messages>` with a marker for the
 * assistant's words and taking what follows it: the end of the assistant's turn, the new turns, the head of the next.
 *
 * `loadTokenizer` needs `npm install @huggingface/tokenizers @huggingface/jinja`; the rest takes any ChatTokenizer.
 */
import { readFile } from "node:fs/promises";
import { join } from "node:path";

import { shown } from "./checks.js";
import { InvalidMessages, TemplateError, TokenizerError } from "./errors.js";
import { fromOpenAIMessages, type Message } from "./openai-messages.js";

export { fromOpenAIMessages, type Message };

/** What is needed of a tokenizer. `loadTokenizer` makes one; any other takes a few lines. */
export interface ChatTokenizer {
  /** The ids that end a text, by the tokenizer's own word. */
  readonly eosTokenIds: readonly number[];
  /** The chat template's text for messages. Throws whatever the template throws. */
  render(messages: readonly Message[], options: TemplateOptions): string;
  /** Ids of a text that has its special tokens written out; adds none. */
  encode(text: string): number[];
  decode(tokenIds: readonly number[], options?: { readonly skipSpecialTokens?: boolean }): string;
  /** Is it a token of its own, beside the vocabulary of text? */
  isAddedToken(tokenId: number): boolean;
}

/** What goes to the chat template, by the names that the template reads: `tools`, and whatever else it knows. */
export interface TemplateOptions {
  readonly [name: string]: unknown;
}

/** How a conversation is rendered. */
export interface ChatOptions {
  /** End with the head of the assistant's turn. Default true. */
  readonly addGenerationPrompt?: boolean | undefined;
  readonly tools?: readonly unknown[] | undefined;
  /** Whatever else the template knows. */
  readonly templateOptions?: TemplateOptions | undefined;
}

/** How a next turn is rendered. */
export interface NextTurnOptions extends ChatOptions {
  /** The tokens generated last, the end token included if the model came to it. */
  readonly after: readonly number[];
}

/** What is used of @huggingface/tokenizers, whose own types a strict compiler cannot resolve. */
interface TokenizersPackage {
  readonly Tokenizer: new (
    tokenizer: object,
    config: object,
  ) => {
    encode(text: string, options: { readonly add_special_tokens: boolean }): { readonly ids: number[] };
    decode(tokenIds: number[], options: { readonly skip_special_tokens: boolean }): string;
    token_to_id(token: string): number | undefined;
    get_added_tokens_decoder(): ReadonlyMap<number, unknown>;
  };
}

const USER = "The quick brown fox";
// Words that no template trims, escapes or takes for markup; two, so that nothing can depend on what they say.
const MARKERS = ["Kqzwxjvbm", "Vhgtfyprd"] as const;

/** The tokenizer in a local folder. Never asks a network and runs no code from the folder. Throws TokenizerError. */
export async function loadTokenizer(folder: string): Promise<ChatTokenizer> {
  const [{ Tokenizer }, { Template }] = await Promise.all([
    import("@huggingface/tokenizers") as Promise<unknown> as Promise<TokenizersPackage>,
    import("@huggingface/jinja"),
  ]).catch((cause: unknown) => {
    throw new TokenizerError(
      "loading a tokenizer needs two packages: npm install @huggingface/tokenizers @huggingface/jinja",
      { cause },
    );
  });
  try {
    const config = await jsonOf(join(folder, "tokenizer_config.json"));
    const tokenizer = new Tokenizer(await jsonOf(join(folder, "tokenizer.json")), config);
    const source = await templateOf(folder, config);
    const template = source === undefined ? undefined : new Template(source);
    const special = specialTokens(config);
    const added = tokenizer.get_added_tokens_decoder();
    const eos = tokenizer.token_to_id(special["eos_token"] ?? "");
    return {
      eosTokenIds: eos === undefined ? [] : [eos],
      render: (messages, options) => {
        if (template === undefined) throw new TemplateError(`the tokenizer in ${folder} has no chat template`);
        return template.render({ ...special, ...options, messages });
      },
      encode: (text) => tokenizer.encode(text, { add_special_tokens: false }).ids,
      decode: (ids, options) => {
        // The package takes no empty list.
        if (ids.length === 0) return "";
        return tokenizer.decode([...ids], { skip_special_tokens: options?.skipSpecialTokens === true });
      },
      isAddedToken: (id) => added.has(id),
    };
  } catch (cause) {
    throw new TokenizerError(`${folder} holds no tokenizer that can be loaded: ${messageOf(cause)}`, { cause });
  }
}

/**
 * The ids of a conversation that starts a session, up to where the assistant is to speak. Throws TemplateError if the
 * template refuses.
 */
export function tokensForChat(
  messages: readonly Message[],
  tokenizer: ChatTokenizer,
  options: ChatOptions = {},
): number[] {
  requireMessages(messages);
  return tokenizer.encode(render(tokenizer, messages, options));
}

/**
 * The ids to append for the next turn: what ends the assistant's, then `messages`, then the head of its next one.
 *
 * `messages` are the new ones only (user, tool, …). What the tokens of `after` already have of the turn's end is not
 * repeated, and if they were cut short (length limit, cancel) the missing end is put in. Nothing of the history is
 * rendered again.
 *
 * Throws TemplateError if the template gives no such ids: it drops or alters the assistant's words, ends a turn
 * differently when another follows, or refuses the roles.
 */
export function tokensForNextTurn(
  messages: readonly Message[],
  tokenizer: ChatTokenizer,
  options: NextTurnOptions,
): number[] {
  requireNew(messages);
  const start: Message[] = [{ role: "user", content: USER }];
  const longer: Message[] = [...start, { role: "assistant", content: USER }, ...start];
  const [end, turn] = afterAssistant(tokenizer, start, MARKERS[0], messages, options);
  const [sameEnd, sameTurn] = afterAssistant(tokenizer, longer, MARKERS[1], messages, options);
  if (!areEqual(end, sameEnd) || !areEqual(turn, sameTurn)) {
    throw new TemplateError(
      "the chat template renders what follows an assistant's turn differently depending on what came before it, " +
        "so the next turn cannot be had without rendering the history again; put the ids together yourself",
    );
  }
  // A template that ends no last turn leaves the end token to the first place of the next.
  for (let present = Math.max(end.length, 1); present > 0; present--) {
    if (areEqual(options.after.slice(-present), turn.slice(0, present))) return turn.slice(present);
  }
  return turn;
}

/** Ids that end an assistant's turn, for a session's `eosTokenIds`: the tokenizer's own and the template's. */
export function endOfTurnIds(tokenizer: ChatTokenizer, options: ChatOptions = {}): number[] {
  const question: Message[] = [{ role: "user", content: USER }];
  const [, [first]] = renderedAfter(tokenizer, question, MARKERS[0], [], { ...options, addGenerationPrompt: false });
  // A turn that ends in plain text has no token of its own for it.
  const own = first !== undefined && tokenizer.isAddedToken(first) ? [first] : [];
  return [...new Set([...tokenizer.eosTokenIds, ...own])];
}

function requireNew(messages: readonly Message[]): void {
  requireMessages(messages);
  const said = messages.findIndex((message) => message["role"] === "assistant");
  if (said >= 0) {
    throw new InvalidMessages(
      `messages[${said}].role`,
      "is assistant; what the model said is in the history already, pass only what is new",
    );
  }
}

function requireMessages(messages: readonly Message[]): void {
  if (!Array.isArray(messages) || messages.length === 0) {
    throw new InvalidMessages("messages", `must be a list of at least one message, got ${shown(messages)}`);
  }
}

/** Ids that follow the assistant's words: the end of its turn alone, and everything up to its next turn. */
function afterAssistant(
  tokenizer: ChatTokenizer,
  before: readonly Message[],
  marker: string,
  messages: readonly Message[],
  options: ChatOptions,
): [number[], number[]] {
  const ending = { ...options, addGenerationPrompt: false };
  const [endText, end] = renderedAfter(tokenizer, before, marker, [], ending);
  const [turnText, turn] = renderedAfter(tokenizer, before, marker, messages, options);
  if (!turnText.startsWith(endText)) {
    throw new TemplateError(
      `the chat template ends an assistant's turn with ${JSON.stringify(endText)} when it is the last, but goes on with ` +
        `${JSON.stringify(turnText.slice(0, endText.length + 20))} when another follows, so no ids can be appended ` +
        "that fit both",
    );
  }
  return [end, turn];
}

/** What the template puts after `marker`, where the assistant says `marker`, as text and as ids. */
function renderedAfter(
  tokenizer: ChatTokenizer,
  before: readonly Message[],
  marker: string,
  messages: readonly Message[],
  options: ChatOptions,
): [string, number[]] {
  const text = render(tokenizer, [...before, { role: "assistant", content: marker }, ...messages], options);
  const times = text.split(marker).length - 1;
  if (times !== 1) {
    throw new TemplateError(
      `the chat template shows the assistant's words ${times} times instead of once, so the place after them cannot be ` +
        "found",
    );
  }
  const cut = text.indexOf(marker) + marker.length;
  // Encoded in its place: on its own, some tokenizers put a space before it.
  const [head, whole] = [tokenizer.encode(text.slice(0, cut)), tokenizer.encode(text)];
  if (!areEqual(whole.slice(0, head.length), head)) {
    throw new TemplateError(
      `the tokenizer joins the assistant's words with ${JSON.stringify(text.slice(cut, cut + 10))}, which the chat ` +
        "template puts after them, so the turn's end has no ids of its own",
    );
  }
  return [text.slice(cut), whole.slice(head.length)];
}

function render(tokenizer: ChatTokenizer, messages: readonly Message[], options: ChatOptions): string {
  try {
    return tokenizer.render(messages, {
      ...options.templateOptions,
      ...(options.tools === undefined ? {} : { tools: options.tools }),
      add_generation_prompt: options.addGenerationPrompt ?? true,
    });
  } catch (cause) {
    const roles = messages.map((message) => String(message["role"])).join(", ");
    throw new TemplateError(`the chat template refuses messages of the roles ${roles}: ${messageOf(cause)}`, { cause });
  }
}

async function jsonOf(path: string): Promise<Record<string, unknown>> {
  return JSON.parse(await readFile(path, "utf8")) as Record<string, unknown>;
}

/** The chat template: a file beside the tokenizer, or a part of its settings. */
async function templateOf(folder: string, config: Record<string, unknown>): Promise<string | undefined> {
  try {
    return await readFile(join(folder, "chat_template.jinja"), "utf8");
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== "ENOENT") throw error;
  }
  const held = config["chat_template"];
  if (!Array.isArray(held)) return typeof held === "string" ? held : undefined;
  const named = held as { readonly name: string; readonly template: string }[];
  return named.find((each) => each.name === "default")?.template;
}

/** The special tokens that templates write, by the names they know them by. */
function specialTokens(config: Record<string, unknown>): Record<string, string> {
  const tokens: Record<string, string> = {};
  for (const name of ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"]) {
    const value = config[name] as string | { readonly content?: string } | null | undefined;
    const content = typeof value === "object" ? value?.content : value;
    if (typeof content === "string") tokens[name] = content;
  }
  return tokens;
}

function areEqual(left: readonly number[], right: readonly number[]): boolean {
  return left.length === right.length && left.every((id, at) => id === right[at]);
}

function messageOf(cause: unknown): string {
  return cause instanceof Error ? cause.message : String(cause);
}
