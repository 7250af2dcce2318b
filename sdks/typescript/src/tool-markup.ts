/**
 * A tool format over one tokenizer: which of its markers are tokens, and where a call begins.
 *
 * A marker that the tokenizer has as a token of its own is written, and found, as that id: what users or tools say can
 * spell it, and is text all the same. In the texts of a format each such token is one noncharacter of Unicode's, which is
 * replaced where a model writes it.
 */
import { common, ID, type FieldSyntax, type ToolFormat } from "./tool-format.js";

const FIRST_MARK = 0xfdd0;
export const ID_MARK = "\ufdef";
export const PREFIX_MARK = "\ufdee";
// Of Harmony, whose messages have headers.
export const START = "<|start|>";
export const CHANNEL = "<|channel|>";
export const CONSTRAIN = "<|constrain|>";
export const MESSAGE = "<|message|>";
export const END = "<|end|>";
export const SPEAKER = "assistant";
const MARKUP = /^(?:<[^<>\s]+>|\[[A-Z_]+\])/;

/** Characters that stand for tokens. */
export const MARKS = /[\ufdd0-\ufdef]/g;

/** The tokens that stand in a format, as characters. */
export class Markers {
  readonly idOf = new Map<string, number>();
  readonly markOf = new Map<number, string>();
  readonly #textOf = new Map<string, string>();
  readonly #markOfText = new Map<string, string>();
  readonly #find: RegExp;

  /** tokens: the tokenizer's own ones, by their text. */
  constructor(texts: readonly string[], tokens: ReadonlyMap<string, number>) {
    const joined = texts.join("\n");
    const held = [...tokens.keys()].filter((token) => joined.includes(token));
    held.sort((one, other) => other.length - one.length);
    held.forEach((token, at) => {
      const mark = String.fromCharCode(FIRST_MARK + at);
      const id = tokens.get(token) ?? 0;
      this.idOf.set(mark, id);
      this.markOf.set(id, mark);
      this.#textOf.set(mark, token);
      this.#markOfText.set(token, mark);
    });
    this.#find = held.length > 0 ? new RegExp(held.map(escaped).join("|"), "g") : /(?!)/g;
  }

  /** The text with its tokens as characters, and a call's id as one. */
  marked(text: string): string {
    return text.replace(this.#find, (token) => this.#markOfText.get(token) ?? token).replaceAll(ID, ID_MARK);
  }

  /** As it reads. */
  shown(marked: string): string {
    return marked
      .split("")
      .map((each) => this.#textOf.get(each) ?? (each === ID_MARK ? ID : each))
      .join("");
  }
}

/**
 * A format whose texts are marked.
 *
 * trigger: what a call begins with wherever it stands, and `begin` goes on behind it; empty where a call has to be the
 * first that is said. hasChannels: are there messages with headers, as in Harmony? tail: what follows every value of `fields`, whose `between` and `end` go on behind it.
 */
export interface MarkedFormat {
  readonly markers: Markers;
  readonly trigger: string;
  readonly begin: string;
  readonly middle: string;
  readonly end: string;
  readonly between: string | undefined;
  readonly fields: FieldSyntax | undefined;
  readonly tail: string;
  readonly callId: string | undefined;
  readonly hasChannels: boolean;
}

export function markedFormat(given: ToolFormat, tokens: ReadonlyMap<string, number>): MarkedFormat {
  const { fields } = given;
  const named = fields && [fields.afterName, fields.between, fields.empty, fields.open, fields.close];
  const hasChannels = given.middle.includes(CHANNEL) && given.middle.includes(MESSAGE);
  const headers = hasChannels ? [START, CHANNEL, CONSTRAIN, MESSAGE, END] : [];
  const texts = [given.begin, given.middle, given.end, given.between ?? "", ...(named ?? []), ...headers];
  const markers = new Markers(texts, tokens);
  const marked = (text: string): string => markers.marked(text);
  const first = marked(given.begin);
  const [trigger, begin] = hasChannels ? ["", first] : split(first.trimStart(), markers);
  const end = marked(given.end);
  const between = given.between === undefined ? undefined : marked(given.between);
  const shared = { markers, trigger, begin, middle: marked(given.middle), callId: given.callId, hasChannels };
  if (fields === undefined) return { ...shared, end, between, fields, tail: "" };
  const next = marked(fields.between);
  const tail = end.slice(0, common(end, next));
  return {
    ...shared,
    end: end.slice(tail.length),
    // A further call is behind a whole one.
    between: between?.slice(end.length),
    fields: {
      ...fields,
      afterName: marked(fields.afterName),
      between: next.slice(tail.length),
      empty: marked(fields.empty),
      open: marked(fields.open),
      close: marked(fields.close),
    },
    tail,
  };
}

/** What a call begins with, and the rest. */
function split(begin: string, markers: Markers): [string, string] {
  if (markers.idOf.has(begin.charAt(0))) return [begin.charAt(0), begin.slice(1)];
  const found = MARKUP.exec(begin)?.[0] ?? "";
  return [found, begin.slice(found.length)];
}

/** For a regular expression of JavaScript's. */
export function escaped(text: string): string {
  return text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
}
