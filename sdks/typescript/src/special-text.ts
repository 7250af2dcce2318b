/**
 * Special tokens come out of what the chat template writes, never out of the messages.
 *
 * A template makes one text of markup and messages, and a tokenizer finds the text of a special token wherever it
 * stands: `<|im_end|>` in a message ends the turn. So:
 *
 *     message    "a <|im_end|> b"          → "a ⟨private character⟩ b", before the template sees it
 *     template   "<|im_start|>user\na ⟨⟩ b<|im_end|>"
 *     encoded    what the template wrote as special tokens, the rest as text, with the merges that text has there
 *
 * The last step takes a copy of the tokenizer in which special tokens have names that no message can hold. Where no
 * message holds such a text, nothing of this happens: the ids are the tokenizer's own for the rendered text, and are
 * only checked to hold no special token that the text does not show. The Python SDK does the same.
 *
 * A template may also write a special token in pieces, with text of a message between them: `<|{{ message.name }}|>`.
 * Then it is asked again, for messages in whose words no character can be one of a special token. What is left is the
 * template's own; if that is less, the messages are refused. A role that templates know is not text of a message.
 */
import { randomBytes } from "node:crypto";

import type { AddedToken } from "./chat-tokens.js";

type Encode = (text: string) => number[];
type Values = Readonly<Record<string, unknown>>;

const FIRST_PRIVATE: number = 0xe000;
const LAST_PRIVATE: number = 0xf8ff;
const PRIVATE_USED = /[\ue000-\uf8ff]/g;
// How a token of markup looks, where the tokenizer does not call it special: `<tool_call>`, `[INST]`.
const MARKUP = /^(?:<\S+>|\[\S+\])$/;
// Some vocabularies have whole tags of HTML, with which users write: vocabulary like any other.
const HTML = new RegExp(
  "^</?(?:a|article|b|blockquote|body|br|caption|code|dd|del|div|dl|dt|em|footer|h[1-6]|head|header|hr|html|i|img|ins" +
    "|kbd|li|mark|ol|p|pre|q|s|section|small|span|strong|sub|sup|table|tbody|td|tfoot|th|thead|title|tr|u|ul|var)/?>$",
);
// Where a template's own text stops and goes on: `'<|' + message.role + '|>'`, `<|{{ role }}|>`, `'<|%s|>' % role`.
const STOPS = /\s*['"{%]/g;
const GOES_ON = /(?:['"}]|%s)\s*/g;
// Values by which templates choose what to write: of messages, of parts of them, and of what tools take.
const KINDS: readonly string[] = ["role", "type"];
const ROLES = ["system", "developer", "user", "assistant", "model", "tool", "function", "ipython", "observation"];
const PARTS = ["text", "image", "image_url", "audio", "input_audio", "video", "document", "file"];
const SCHEMA = ["object", "array", "string", "number", "integer", "boolean", "null"];
const KNOWN_KINDS: ReadonlySet<string> = new Set([...ROLES, ...PARTS, ...SCHEMA]);

/** Markup and messages cannot be kept apart; says why. */
export class SpecialTextError extends Error {}

/** What must not come out of messages, by its text. */
export class SpecialTokens {
  /** All of it. */
  readonly ids: ReadonlyMap<string, number>;
  /** Characters with which texts of two origins could be joined to a special token. */
  readonly edges: ReadonlySet<string>;
  readonly unknownId: number | undefined;
  /** Those that the template could write around words of messages. */
  readonly inPieces: readonly string[];
  /** Characters that words between two pieces of a special token could have, whatever their case; edges, too. */
  readonly letters: ReadonlySet<string>;
  // In no message: special tokens and ends of text. And with it other added tokens that look like markup, such as
  // `<tool_response>`; the assistant's own messages may hold them, because models write them.
  readonly #turns: RegExp;
  readonly #all: RegExp;

  constructor(
    added: readonly AddedToken[],
    facts: { readonly endIds: readonly number[]; readonly template: string; readonly unknownId: number | undefined },
  ) {
    const named = added.filter(({ text }) => text.trim() !== "");
    const turns = named.filter(({ id, isSpecial }) => isSpecial || facts.endIds.includes(id));
    const markup = named.filter(
      (token) =>
        !turns.includes(token) &&
        MARKUP.test(token.text) &&
        (facts.template.includes(token.text) || !HTML.test(token.text)),
    );
    this.ids = new Map([...markup, ...turns].map(({ id, text }) => [text, id]));
    this.unknownId = facts.unknownId;
    this.#turns = anyOf(turns.map(({ text }) => text));
    this.#all = anyOf(this.ids.keys());
    const near = turns.flatMap(({ text }) => [...Array.from(text).slice(0, 2), ...Array.from(text).slice(-2)]);
    this.edges = new Set(near.filter((character) => !/[\p{L}\p{N}\s/]/u.test(character)));
    this.inPieces = inPieces(
      turns.map(({ text }) => text),
      this.edges,
      facts.template,
    );
    const held = this.inPieces.join("");
    this.letters = new Set([...this.edges, ...Array.from(held + held.toLowerCase() + held.toUpperCase())]);
  }

  /** Is that value of that name one by which templates choose, and no text? */
  isKind(name: string, value: string): boolean {
    return KINDS.includes(name) && (KNOWN_KINDS.has(value) || !this.inPieces.some((text) => text.includes(value)));
  }

  finder(markup: boolean): RegExp {
    return markup ? this.#all : this.#turns;
  }
}

/** Messages and options as the template is to see them, and what becomes of the text that it makes of them. */
export class Conversation {
  readonly messages: readonly Values[];
  readonly options: Values;
  /** Could a special token be put together from pieces of messages? Then `checkBroken` decides. */
  readonly isDoubtful: boolean;
  readonly #special: SpecialTokens;
  readonly #given: readonly [readonly Values[], Values];
  readonly #shown: ReadonlyMap<string, string>;
  readonly #tokenOf: ReadonlyMap<string, string>;

  /** Throws SpecialTextError if there are more kinds of special tokens in the messages than can be held apart. */
  constructor(special: SpecialTokens, messages: readonly Values[], options: Values) {
    this.#special = special;
    this.#given = [messages, options];
    const texts = [...messages, options].flatMap((value) => [...textsIn(value)]);
    this.#shown = this.#placeholders(texts);
    this.#tokenOf = new Map([...this.#shown].map(([token, character]) => [character, token]));
    this.isDoubtful =
      special.inPieces.length > 0 || texts.some((text) => [...special.edges].some((edge) => text.includes(edge)));
    [this.messages, this.options] = this.#changed((text) => text);
  }

  /** The same without any character that could be a part of a special token. */
  broken(): [readonly Values[], Values] {
    let code = LAST_PRIVATE;
    while (this.#tokenOf.has(String.fromCharCode(code))) code--;
    const spare = String.fromCharCode(code);
    const { edges, letters, inPieces } = this.#special;
    const without = (characters: ReadonlySet<string>) => (text: string) =>
      Array.from(text)
        .map((character) => (characters.has(character) ? spare : character))
        .join("");
    const [messages, options] = this.#changed(without(edges));
    if (inPieces.length === 0) return [messages, options];
    const words = without(letters);
    const blank = (value: unknown): unknown =>
      blanked(value, "", (text, name) => (this.#special.isKind(name, text) ? text : words(text)), spare);
    const given = ["tools", "documents"].filter((name) => name in options);
    return [
      messages.map((message) => blank(message) as Values),
      { ...options, ...Object.fromEntries(given.map((name) => [name, blank(options[name])])) },
    ];
  }

  /**
   * Throws SpecialTextError if a special token of `text` is put together from pieces of messages.
   * text, broken: what the template makes of `messages` and of `broken()`.
   */
  checkBroken(text: string, broken: string): void {
    const find = this.#special.finder(false);
    const [found, calm] = [text.match(find) ?? [], broken.match(find) ?? []];
    if (found.length !== calm.length || found.some((token, at) => token !== calm[at])) {
      throw new SpecialTextError("the chat template puts a special token together from parts of the messages");
    }
  }

  /**
   * The ids of a rendered text, or of its beginning. encode: the tokenizer's own method.
   *
   * Throws SpecialTextError if a special token would come out of a message, or the template altered the messages'
   * special text irreversibly.
   */
  encode(text: string, encode: Encode, respelled: () => Respelled): number[] {
    const held = [...this.#tokenOf.keys()];
    const lowered = held.length > 0 ? text.toLowerCase() : "";
    if (held.some((character) => lowered.includes(`\\u${character.charCodeAt(0).toString(16)}`))) {
      throw new SpecialTextError(`${this.#named()}, which the chat template escapes`);
    }
    let ids: number[];
    if (held.some((character) => text.includes(character))) {
      const copy = respelled();
      const bare = Array.from(text)
        .filter((character) => !this.#tokenOf.has(character))
        .join("");
      if (!areEqual(encode(bare), copy.encode(copy.spell(bare, new Map())))) {
        throw new SpecialTextError(`${this.#named()}, and this tokenizer cannot read that as text`);
      }
      ids = copy.encode(copy.spell(text, this.#tokenOf));
    } else {
      ids = encode(text);
    }
    this.#check(text, ids);
    return ids;
  }

  #check(text: string, ids: readonly number[]): void {
    const known = this.#special.ids;
    const special = new Set(known.values());
    if (this.#special.unknownId !== undefined) special.delete(this.#special.unknownId);
    const left = new Map<number, number>();
    for (const token of text.match(this.#special.finder(true)) ?? []) {
      const id = known.get(token) ?? -1;
      left.set(id, (left.get(id) ?? 0) + 1);
    }
    for (const id of ids) {
      if (!special.has(id)) continue;
      const count = left.get(id) ?? 0;
      if (count === 0) throw new SpecialTextError("the tokenizer makes special tokens of text that is none");
      left.set(id, count - 1);
    }
  }

  #named(): string {
    return `the messages hold ${[...this.#shown.keys()].map((token) => JSON.stringify(token)).join(", ")}`;
  }

  #placeholders(texts: readonly string[]): Map<string, string> {
    const [messages, options] = this.#given;
    const found = new Set<string>();
    for (const message of messages) {
      for (const text of textsIn(message))
        for (const token of text.match(this.#finder(message)) ?? []) found.add(token);
    }
    for (const text of textsIn(options))
      for (const token of text.match(this.#special.finder(true)) ?? []) found.add(token);
    const shown = new Map<string, string>();
    if (found.size === 0) return shown;
    const used = new Set(texts.flatMap((text) => text.match(PRIVATE_USED) ?? []));
    const free: string[] = [];
    for (let code = FIRST_PRIVATE; code <= LAST_PRIVATE; code++) {
      const character = String.fromCharCode(code);
      if (!used.has(character)) free.push(character);
    }
    // One more is for `broken`.
    if (found.size >= free.length) throw new SpecialTextError("the messages hold too many private characters");
    for (const [at, token] of [...found].sort().entries()) shown.set(token, free[at] ?? "");
    return shown;
  }

  #finder(message: Values): RegExp {
    return this.#special.finder(message["role"] !== "assistant");
  }

  #changed(change: (text: string) => string): [readonly Values[], Values] {
    const [messages, options] = this.#given;
    const through = (find: RegExp) => (text: string) =>
      change(text.replace(find, (token) => this.#shown.get(token) ?? token));
    const changed = messages.map((message) => mapped(message, through(this.#finder(message))) as Values);
    return [changed, mapped(options, through(this.#special.finder(true))) as Values];
  }
}

/** A copy of a tokenizer in which special tokens have names that no message can hold, and nothing else differs. */
export class Respelled {
  readonly encode: Encode;
  readonly #names: ReadonlyMap<string, string>;
  readonly #find: RegExp;

  /** copy: the tokenizer's own `encode`, with new texts for some of its tokens. */
  constructor(special: SpecialTokens, copy: (names: ReadonlyMap<string, string>) => Encode) {
    const nonce = randomBytes(8).toString("hex");
    this.#names = new Map([...special.ids].map(([text, id]) => [text, `\ue100${nonce}.${id}\ue101`]));
    this.#find = special.finder(true);
    this.encode = copy(this.#names);
  }

  /** `text` with its special tokens under their names, and the characters of `tokenOf` as the texts they are. */
  spell(text: string, tokenOf: ReadonlyMap<string, string>): string {
    const named = text.replace(this.#find, (token) => this.#names.get(token) ?? token);
    return tokenOf.size === 0
      ? named
      : Array.from(named)
          .map((character) => tokenOf.get(character) ?? character)
          .join("");
  }
}

/** What tokenizer.json holds, with other texts for some tokens. Throws SpecialTextError if that would change merges. */
export function renamed(specification: Values, names: ReadonlyMap<string, string>): Values {
  const nameOf = (text: string): string => names.get(text) ?? text;
  const model = specification["model"] as {
    readonly vocab: Readonly<Record<string, number>> | readonly (readonly [string, number])[];
    readonly merges?: readonly (string | readonly string[])[];
    readonly unk_token?: string | null;
  };
  for (const merge of model.merges ?? []) {
    if (names.has(typeof merge === "string" ? merge.replace(" ", "") : merge.join(""))) {
      throw new SpecialTextError("this tokenizer cannot separate text from special tokens");
    }
  }
  const added = specification["added_tokens"] as readonly { readonly content: string }[];
  return {
    ...specification,
    added_tokens: added.map((token) => ({ ...token, content: nameOf(token.content) })),
    model: {
      ...model,
      vocab: Array.isArray(model.vocab)
        ? model.vocab.map(([piece, score]: [string, number]) => [nameOf(piece), score])
        : Object.fromEntries(Object.entries(model.vocab).map(([piece, id]: [string, number]) => [nameOf(piece), id])),
      ...(typeof model.unk_token === "string" ? { unk_token: nameOf(model.unk_token) } : {}),
    },
    // What it adds and trims changes no ids of text.
    post_processor: null,
  };
}

/** All texts in a message or an option, names included. */
function* textsIn(value: unknown): Generator<string> {
  if (typeof value === "string") {
    yield value;
  } else if (Array.isArray(value)) {
    for (const item of value) yield* textsIn(item);
  } else if (typeof value === "object" && value !== null) {
    for (const [name, item] of Object.entries(value)) {
      yield name;
      yield* textsIn(item);
    }
  }
}

/**
 * The same value, called `name`, with its texts changed; names stay.
 *
 * Names of a call's arguments are words as well. They are made of `spare`, so that no two become one.
 */
function blanked(value: unknown, name: string, change: (text: string, name: string) => string, spare: string): unknown {
  if (typeof value === "string") return change(value, name);
  if (Array.isArray(value)) return value.map((item) => blanked(item, name, change, spare));
  if (typeof value !== "object" || value === null) return value;
  const isWords = name === "arguments";
  return Object.fromEntries(
    Object.entries(value).map(([each, item], at) => [
      isWords ? spare.repeat(at + 1) : each,
      blanked(item, isWords ? name : each, change, spare),
    ]),
  );
}

/** The same value with its texts changed, those of names included. */
function mapped(value: unknown, change: (text: string) => string): unknown {
  if (typeof value === "string") return change(value);
  if (Array.isArray(value)) return value.map((item) => mapped(item, change));
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [change(name), mapped(item, change)]));
}

/** Of `tokens`, those of which the template could write beginning and end, and words without edges the rest. */
function inPieces(tokens: readonly string[], edges: ReadonlySet<string>, template: string): readonly string[] {
  if (template === "") return tokens; // the template is unknown
  const sizes = Array.from({ length: Math.max(0, ...tokens.map((token) => token.length)) }, (_, size) => size);
  const stops = new Set<string>();
  for (const { index } of template.matchAll(STOPS)) {
    for (const size of sizes) stops.add(template.slice(Math.max(0, index - size), index));
  }
  const goesOn = new Set<string>();
  for (const { index, 0: found } of template.matchAll(GOES_ON)) {
    for (const size of sizes) goesOn.add(template.slice(index + found.length, index + found.length + size));
  }
  return tokens.filter((token) => {
    const characters = Array.from(token);
    const first = run(characters, edges);
    const last = characters.length - run(characters.toReversed(), edges);
    const begins = characters.map((_, size) => characters.slice(0, size).join("")).slice(first);
    const ends = characters.map((_, size) => characters.slice(size + 1).join("")).slice(0, last);
    return (
      begins.some((each) => each === "" || stops.has(each)) && ends.some((each) => each === "" || goesOn.has(each))
    );
  });
}

/** How many characters at the beginning are edges. */
function run(characters: readonly string[], edges: ReadonlySet<string>): number {
  const at = characters.findIndex((character) => !edges.has(character));
  return at < 0 ? characters.length : at;
}

/** Matches the longest of `texts`, in time that does not grow with their number. */
function anyOf(texts: Iterable<string>): RegExp {
  const words = new Set(texts);
  return new RegExp(words.size === 0 ? "(?!)" : alternatives(words), "gu");
}

function alternatives(words: ReadonlySet<string>): string {
  const byFirst = new Map<string, Set<string>>();
  for (const word of words) {
    const [first] = word;
    if (first === undefined) continue;
    const rests = byFirst.get(first) ?? new Set();
    byFirst.set(first, rests.add(word.slice(first.length)));
  }
  if (byFirst.size === 0) return "";
  const branches = [...byFirst].map(
    ([first, rests]) => first.replace(/[\\^$.*+?()[\]{}|/]/u, "\\$&") + alternatives(rests),
  );
  return `(?:${branches.join("|")})${words.has("") ? "?" : ""}`;
}

function areEqual(left: readonly number[], right: readonly number[]): boolean {
  return left.length === right.length && left.every((id, at) => id === right[at]);
}
