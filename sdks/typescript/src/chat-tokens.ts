/**
 * Chat messages to token ids, on the client's side, as fits a history that only grows.
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
 * Special tokens come from the template alone: text in a message that reads like one (`<|im_end|>`) is encoded as text,
 * unless `allowSpecialTokens` asks for what the tokenizer would make of it.
 *
 * `loadTokenizer` needs `npm install @huggingface/tokenizers @huggingface/jinja`; the rest takes any ChatTokenizer.
 */
import { readdir, readFile } from "node:fs/promises";
import { homedir } from "node:os";
import { join } from "node:path";

import { booleanOf, shown } from "./checks.js";
import { InvalidMessages, TemplateError, TokenizerError } from "./errors.js";
import type { Message } from "./openai-messages.js";
import { known } from "./options.js";
import { Conversation, renamed, Respelled, SpecialTextError, SpecialTokens } from "./special-text.js";

/** A token of its own, beside the vocabulary of text. */
export interface AddedToken {
  readonly id: number;
  readonly text: string;
  /** Does the tokenizer call it special? */
  readonly isSpecial: boolean;
}

/** What is needed of a tokenizer. `loadTokenizer` makes one; any other takes a few lines. */
export interface ChatTokenizer {
  /** The ids that end a text, by the tokenizer's own word. */
  readonly eosTokenIds: readonly number[];
  /** The chat template's text for messages. Throws whatever the template throws. */
  render(messages: readonly Message[], options: TemplateOptions): string;
  /** Ids of a text that has its special tokens written out; adds none. */
  encode(text: string): number[];
  decode(tokenIds: readonly number[], options?: { readonly skipSpecialTokens?: boolean }): string;
  /** The tokens of its own, beside the vocabulary of text: special ones and markup. */
  readonly addedTokens: readonly AddedToken[];
  /** What stands for text that is not in the vocabulary, if anything does. */
  readonly unknownTokenId?: number | undefined;
  /** The chat template's source: tokens that it writes are markup, even if they are not called special. */
  readonly chatTemplate?: string | undefined;
  /** How many tokens of text it has, those that were added not counted: `client.tokenizer` compares it with the model. */
  readonly textTokens?: number | undefined;
  /**
   * What encodes as `encode` does, if the tokens of these texts had the names given. Without it, messages that hold the
   * text of a special token are refused.
   */
  readonly encodeRenamed?: ((names: ReadonlyMap<string, string>) => (text: string) => number[]) | undefined;
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
  /** Text in messages, tools and options that reads like a special token becomes that token. Default false. */
  readonly allowSpecialTokens?: boolean | undefined;
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
    get_added_tokens_decoder(): ReadonlyMap<number, { readonly content: string; readonly special: boolean }>;
  };
}

const USER = "The quick brown fox";
// Words that no template trims, escapes or takes for markup; two, so that nothing can depend on what they say.
const MARKERS = ["Kqzwxjvbm", "Vhgtfyprd"] as const;
const DISTINCT = 24; // characters: no template says so much that a message says, too
// By these names templates expect documents or tools, which a plain conversation has not.
const FOR_TOOLS = "tool_use";
const SPECIAL_PURPOSES = ["rag", FOR_TOOLS];

/**
 * The tokenizer in a local folder, which may begin with `~/`. Never asks a network and runs no code from the folder.
 * Throws TokenizerError.
 */
export async function loadTokenizer(folder: string): Promise<ChatTokenizer> {
  if (folder.startsWith("~/")) return await loadTokenizer(join(homedir(), folder.slice(2)));
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
    const held = await readFile(join(folder, "tokenizer.json"), "utf8");
    const specification = (): Record<string, unknown> => JSON.parse(held) as Record<string, unknown>;
    const tokenizer = new Tokenizer(specification(), config);
    const templates = await templatesIn(folder, config);
    const [source, forTools] = [plainTemplate(folder, templates), templates.get(FOR_TOOLS)];
    const template = source === undefined ? undefined : new Template(source);
    const toolTemplate = forTools === undefined ? template : new Template(forTools);
    const asText = new Template('{{ "" + parts }}');
    const special = specialTokens(config);
    const added = tokenizer.get_added_tokens_decoder();
    // The ends of a text, of a turn and of a message.
    const { vocab } = specification()["model"] as { readonly vocab: object };
    const ends = ["eos_token", "eot_token", "eom_token"].map((name) => tokenizer.token_to_id(special[name] ?? ""));
    return {
      eosTokenIds: [...new Set(ends.filter((id) => id !== undefined))],
      render: (messages, options) => {
        const { tools } = options;
        const chosen = Array.isArray(tools) && tools.length > 0 ? toolTemplate : template;
        if (chosen === undefined) throw new TemplateError(`the tokenizer in ${folder} has no chat template`);
        const text = chosen.render({ ...special, ...options, messages });
        refuseWrittenParts(messages, text, (parts) => asText.render({ parts }));
        return text;
      },
      encode: (text) => tokenizer.encode(text, { add_special_tokens: false }).ids,
      decode: (ids, options = {}) => {
        known(options, "decode");
        // The package takes no empty list.
        if (ids.length === 0) return "";
        return tokenizer.decode([...ids], { skip_special_tokens: options.skipSpecialTokens === true });
      },
      addedTokens: [...added].map(([id, token]) => ({ id, text: token.content, isSpecial: token.special })),
      unknownTokenId: tokenizer.token_to_id(special["unk_token"] ?? ""),
      textTokens: Object.keys(vocab).length,
      chatTemplate: templates.size === 0 ? undefined : [...templates.values()].join(""),
      encodeRenamed: (names) => {
        const copy = new Tokenizer(renamed(specification(), names), config);
        return (text) => copy.encode(text, { add_special_tokens: false }).ids;
      },
    };
  } catch (cause) {
    if (cause instanceof Error && "code" in cause && (cause.code === "ENOENT" || cause.code === "ENOTDIR")) {
      throw new TokenizerError(
        `${folder} holds no tokenizer; give the folder that holds tokenizer.json and tokenizer_config.json`,
        { cause },
      );
    }
    if (cause instanceof TokenizerError) throw cause;
    throw new TokenizerError(`${folder} holds no tokenizer that can be loaded: ${messageOf(cause)}`, { cause });
  }
}

/**
 * The ids of a conversation that starts a session, up to where the assistant is to speak.
 *
 * Text in messages, tools and options that reads like a special token is encoded as text; with `allowSpecialTokens` it
 * becomes the token, as if the template wrote it. Throws TemplateError if the template refuses, or if markup and messages
 * cannot be kept apart.
 */
export function tokensForChat(
  messages: readonly Message[],
  tokenizer: ChatTokenizer,
  options: ChatOptions = {},
): number[] {
  requireMessages(messages);
  const { text, encode } = written(tokenizer, messages, known(options, "tokensForChat"));
  return encode(text);
}

/**
 * The ids to append for the next turn: what ends the assistant's, then `messages`, then the head of its next one.
 *
 * `messages` are the new ones only (user, tool, …). What the tokens of `after` already have of the turn's end is not
 * repeated, and if they were cut short (length limit, cancel) the missing end is put in. Nothing of the history is
 * rendered again. Special tokens come from the template alone, as in `tokensForChat`.
 *
 * Throws TemplateError if the template gives no such ids: it drops or alters the assistant's words, ends a turn
 * differently when another follows, or refuses the roles; or markup and messages cannot be kept apart.
 */
export function tokensForNextTurn(
  messages: readonly Message[],
  tokenizer: ChatTokenizer,
  options: NextTurnOptions,
): number[] {
  requireNew(messages);
  known(options, "tokensForNextTurn");
  const [one, other] = markersFor([messages, options.tools, options.templateOptions]).map((marker) =>
    spokenWords(tokenizer, marker, options),
  ) as [Spoken, Spoken];
  return idsAfter(tokenizer, one, other, messages, options);
}

/** An assistant's message with a word that stands in it once. Its turn's end is behind that word and `closing`. */
export interface Spoken {
  readonly message: Message;
  readonly marker: string;
  readonly closing: string;
}

function spokenWords(tokenizer: ChatTokenizer, marker: string, options: ChatOptions): Spoken {
  return { message: { role: "assistant", content: said(tokenizer, marker, options) }, marker, closing: "" };
}

/**
 * The ids that follow what the assistant spoke, but for those that were generated. one, other: the same turn with other
 * words. Throws TemplateError as `tokensForNextTurn`.
 */
export function idsAfter(
  tokenizer: ChatTokenizer,
  one: Spoken,
  other: Spoken,
  messages: readonly Message[],
  options: NextTurnOptions,
): number[] {
  const words = said(tokenizer, USER, options);
  const start: Message[] = [{ role: "user", content: words }];
  const longer: Message[] = [...start, { role: "assistant", content: words }, ...start];
  const [end, turn] = afterAssistant(tokenizer, start, one, messages, options);
  const [sameEnd, sameTurn] = afterAssistant(tokenizer, longer, other, messages, options);
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

/**
 * Ids that end an assistant's turn, for a session's `eosTokenIds`: the tokenizer's own and the template's.
 *
 * A session that names none has those of its server's model. These are for a tokenizer or a template of your own.
 */
export function endOfTurnIds(tokenizer: ChatTokenizer, options: ChatOptions = {}): number[] {
  known(options, "endOfTurnIds");
  const question: Message[] = [{ role: "user", content: said(tokenizer, USER, options) }];
  const [marker] = markersFor([options.tools, options.templateOptions]);
  const spoken = spokenWords(tokenizer, marker, options);
  const [, [first]] = renderedAfter(tokenizer, question, spoken, [], { ...options, addGenerationPrompt: false });
  // A turn that ends in plain text has no token of its own for it.
  const own = first !== undefined && tokenizer.addedTokens.some(({ id }) => id === first) ? [first] : [];
  return [...new Set([...tokenizer.eosTokenIds, ...own])];
}

/** The markers, each with as many letters more as it takes to be in no text of what the template is given. */
export function markersFor(given: unknown): [string, string] {
  const texts = [...textsOf(given)];
  const marker = (word: string): string => {
    const runs = texts.flatMap((text) => [...text.matchAll(new RegExp(`${word}(x*)`, "g"))].map(([found]) => found));
    return runs.reduce((longest, run) => (run.length < longest.length ? longest : `${run}x`), word);
  };
  return [marker(MARKERS[0]), marker(MARKERS[1])];
}

/** Every text within messages and options, names of fields too. */
function* textsOf(value: unknown): Generator<string> {
  if (typeof value === "object" && value !== null) {
    for (const [name, part] of Object.entries(value)) {
      yield name;
      yield* textsOf(part);
    }
  } else yield String(value);
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
  spoken: Spoken,
  messages: readonly Message[],
  options: ChatOptions,
): [number[], number[]] {
  const ending = { ...options, addGenerationPrompt: false };
  const [endText, end] = renderedAfter(tokenizer, before, spoken, [], ending);
  const [turnText, turn] = renderedAfter(tokenizer, before, spoken, messages, options);
  // A call's result can belong to the turn of the call.
  if (!turnText.startsWith(endText) && spoken.closing !== "") return [[], turn];
  if (!turnText.startsWith(endText) && turnText.startsWith(withoutTextEnd(tokenizer, endText, end))) {
    return [end.slice(0, -1), turn];
  }
  if (!turnText.startsWith(endText)) {
    throw new TemplateError(
      `the chat template ends an assistant's turn with ${JSON.stringify(endText)} when it is the last, but goes on with ` +
        `${JSON.stringify(turnText.slice(0, endText.length + 20))} when another follows, so no ids can be appended ` +
        "that fit both",
    );
  }
  return [end, turn];
}

/**
 * What follows an assistant's words, without the end of a text that templates of Phi put behind a conversation. Only
 * behind another token, which ends the turn: else it is the turn's end itself.
 */
function withoutTextEnd(tokenizer: ChatTokenizer, text: string, ids: readonly number[]): string {
  const before = ids.slice(0, -1);
  const last = tokenizer.addedTokens.find(({ id }) => id === ids.at(-1) && tokenizer.eosTokenIds.includes(id));
  const isBehind = tokenizer.addedTokens.some(({ id }) => before.includes(id));
  return last !== undefined && isBehind && text.endsWith(last.text) ? text.slice(0, -last.text.length) : text;
}

/** What the template puts after what the assistant spoke, as text and as ids. */
function renderedAfter(
  tokenizer: ChatTokenizer,
  before: readonly Message[],
  spoken: Spoken,
  messages: readonly Message[],
  options: ChatOptions,
): [string, number[]] {
  const { marker, closing } = spoken;
  const { text, encode } = written(tokenizer, [...before, spoken.message, ...messages], options);
  const times = text.split(marker).length - 1;
  if (times !== 1) {
    throw new TemplateError(
      `the chat template shows the assistant's words ${times} times instead of once, so the place after them cannot be ` +
        "found",
    );
  }
  const marked = text.indexOf(marker) + marker.length;
  if (!text.startsWith(closing, marked)) {
    throw new TemplateError(
      `the chat template ends a call with ${JSON.stringify(text.slice(marked, marked + closing.length))} instead of ` +
        `${JSON.stringify(closing)}, so the place after it cannot be found`,
    );
  }
  const cut = marked + closing.length;
  // Encoded in its place: on its own, some tokenizers put a space before it.
  const [head, whole] = [encode(text.slice(0, cut)), encode(text)];
  if (!areEqual(whole.slice(0, head.length), head)) {
    throw new TemplateError(
      `the tokenizer joins the assistant's words with ${JSON.stringify(text.slice(cut, cut + 10))}, which the chat ` +
        "template puts after them, so the turn's end has no ids of its own",
    );
  }
  return [text.slice(cut), whole.slice(head.length)];
}

/** A conversation as one text, in which special tokens of messages are not spelled out, and what encodes its beginnings. */
function written(
  tokenizer: ChatTokenizer,
  messages: readonly Message[],
  options: ChatOptions,
): { readonly text: string; readonly encode: (part: string) => number[] } {
  const given = { ...options.templateOptions, ...(options.tools === undefined ? {} : { tools: options.tools }) };
  const prompt = { add_generation_prompt: booleanOf(options.addGenerationPrompt ?? true, "addGenerationPrompt") };
  const plain = (part: string): number[] => tokenizer.encode(part);
  if (booleanOf(options.allowSpecialTokens ?? false, "allowSpecialTokens")) {
    const text = render(tokenizer, messages, { ...given, ...prompt });
    requireWords(tokenizer, messages, text, { ...given, ...prompt });
    return { text, encode: plain };
  }
  return keptApart(() => {
    const special = specialTokensOf(tokenizer);
    const conversation = new Conversation(special, messages, given);
    const text = render(tokenizer, conversation.messages, { ...conversation.options, ...prompt });
    requireWords(tokenizer, conversation.messages, text, { ...conversation.options, ...prompt });
    if (conversation.isDoubtful) {
      const [broken, brokenOptions] = conversation.broken();
      conversation.checkBroken(text, render(tokenizer, broken, { ...brokenOptions, ...prompt }));
    }
    const copy = (): Respelled => respelledOf(tokenizer, special);
    return { text, encode: (part) => keptApart(() => conversation.encode(part, plain, copy)) };
  });
}

function keptApart<T>(work: () => T): T {
  try {
    return work();
  } catch (cause) {
    if (!(cause instanceof SpecialTextError)) throw cause;
    const remedy = "take that out of the messages, or pass allowSpecialTokens: true";
    throw new TemplateError(`${cause.message}; ${remedy}`, { cause });
  }
}

// Both take long for a large vocabulary; the second is needed only by conversations that hold text of special tokens.
const SPECIAL = new WeakMap<ChatTokenizer, SpecialTokens>();
const RESPELLED = new WeakMap<SpecialTokens, Respelled>();

export function specialTokensOf(tokenizer: ChatTokenizer): SpecialTokens {
  const held = SPECIAL.get(tokenizer);
  if (held !== undefined) return held;
  const { addedTokens, eosTokenIds, chatTemplate, unknownTokenId } = tokenizer;
  const made = new SpecialTokens(addedTokens, {
    endIds: eosTokenIds,
    template: chatTemplate ?? "",
    unknownId: unknownTokenId,
  });
  SPECIAL.set(tokenizer, made);
  return made;
}

function respelledOf(tokenizer: ChatTokenizer, special: SpecialTokens): Respelled {
  const held = RESPELLED.get(special);
  if (held !== undefined) return held;
  const made = new Respelled(special, (names) => {
    if (tokenizer.encodeRenamed !== undefined) return tokenizer.encodeRenamed(names);
    throw new SpecialTextError(
      "the messages hold the text of a special token, and this tokenizer has no encodeRenamed",
    );
  });
  RESPELLED.set(special, made);
  return made;
}

/**
 * What is said to the model has to be in the rendering: the text itself if it is long enough to be there by no accident,
 * or else a marker in its place. The model's own earlier words may be left out, as its reasoning is.
 */
function requireWords(
  tokenizer: ChatTokenizer,
  messages: readonly Message[],
  text: string,
  options: TemplateOptions,
): void {
  const marked = new Map<number, string>();
  for (const [index, { role, content }] of messages.entries()) {
    if (role === "assistant" || typeof content !== "string") continue;
    const said = content.trim();
    if (said === "" || (said.length >= DISTINCT && text.includes(said))) continue;
    marked.set(index, `${MARKERS[0].toLowerCase()}${index}z`);
  }
  if (marked.size === 0) return;
  const renderedWith = (some: ReadonlyMap<number, string>): string => {
    const changed = messages.map((message, index) =>
      some.has(index) ? { ...message, content: some.get(index) } : message,
    );
    return render(tokenizer, changed, options).toLowerCase();
  };
  const together = renderedWith(marked);
  for (const [index, marker] of marked) {
    // A template can depend on what others say.
    if (together.includes(marker) || renderedWith(new Map([[index, marker]])).includes(marker)) continue;
    throw new TemplateError(
      `the chat template drops the words of messages[${index}]; if it wants content as a list of parts, ` +
        'give [{ type: "text", text: "…" }]',
    );
  }
}

/** Content that the template shows: the words, or a list of parts where it takes nothing else. */
function said(tokenizer: ChatTokenizer, words: string, options: ChatOptions): unknown {
  const given = { ...options.templateOptions, ...(options.tools === undefined ? {} : { tools: options.tools }) };
  const shows = (content: unknown): boolean => {
    try {
      const asked = [{ role: "user", content }];
      return tokenizer.render(asked, { ...given, add_generation_prompt: false }).includes(words);
    } catch {
      return false;
    }
  };
  const parts = [{ type: "text", text: words }];
  return shows(words) || !shows(parts) ? words : parts;
}

export function render(tokenizer: ChatTokenizer, messages: readonly Message[], options: TemplateOptions): string {
  try {
    return tokenizer.render(messages, options);
  } catch (cause) {
    const roles = messages.map((message) => String(message["role"])).join(", ");
    throw new TemplateError(`the chat template refuses messages of the roles ${roles}: ${messageOf(cause)}`, { cause });
  }
}

/**
 * Throws for content in parts that the template took for text: the package writes such a list as JSON, where jinja in
 * Python refuses to join it to text.
 */
function refuseWrittenParts(messages: readonly Message[], text: string, written: (parts: unknown) => string): void {
  for (const { content } of messages) {
    if (Array.isArray(content) && content.length > 0 && text.includes(written(content))) {
      throw new TypeError(
        "content is a list of parts, and this template takes it for text; fromOpenAIMessages joins the parts",
      );
    }
  }
}

async function jsonOf(path: string): Promise<Record<string, unknown>> {
  return JSON.parse(await readFile(path, "utf8")) as Record<string, unknown>;
}

/** The template for a plain conversation: the default, the only one, or the only one that is for no special purpose. */
function plainTemplate(folder: string, templates: ReadonlyMap<string, string>): string | undefined {
  const plain = [...templates.keys()].filter((name) => !SPECIAL_PURPOSES.includes(name));
  for (const names of [templates.has("default") ? ["default"] : [], [...templates.keys()], plain]) {
    if (names.length === 1) return templates.get(names[0] ?? "");
  }
  if (templates.size === 0) return undefined;
  const names = [...templates.keys()].join(", ");
  throw new TokenizerError(
    `the chat templates in ${folder} are named ${names}, and none is the default; ` +
      "put the one to use into chat_template.jinja there",
  );
}

/** Chat templates by name: of chat_template.json, in their place tokenizer_config.json's, and those in files. */
async function templatesIn(folder: string, config: Record<string, unknown>): Promise<Map<string, string>> {
  const found = new Map<string, string>();
  const held =
    config["chat_template"] ?? (await unlessMissing(jsonOf(join(folder, "chat_template.json"))))?.["chat_template"];
  if (typeof held === "string") found.set("default", held);
  if (Array.isArray(held)) {
    for (const { name, template } of held as { readonly name: string; readonly template: string }[]) {
      found.set(name, template);
    }
  }
  const own = await unlessMissing(readFile(join(folder, "chat_template.jinja"), "utf8"));
  if (own !== undefined) found.set("default", own);
  const more = join(folder, "additional_chat_templates");
  for (const file of ((await unlessMissing(readdir(more))) ?? []).sort()) {
    if (file.endsWith(".jinja")) found.set(file.slice(0, -".jinja".length), await readFile(join(more, file), "utf8"));
  }
  return found;
}

async function unlessMissing<T>(reading: Promise<T>): Promise<T | undefined> {
  try {
    return await reading;
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === "ENOENT") return undefined;
    throw error;
  }
}

/** The special tokens that templates write, by the names they know them by. */
function specialTokens(config: Record<string, unknown>): Record<string, string> {
  const tokens: Record<string, string> = {};
  for (const kind of ["bos", "eos", "eot", "eom", "unk", "pad", "sep", "cls", "mask"]) {
    const name = `${kind}_token`;
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
