/**
 * Tokens to text and tool calls, as they come.
 *
 *     ids ▸ text, in which markers are characters ▸ text for the user
 *                                                 ▸ a call's name ▸ its arguments, piece by piece ▸ the call
 *
 * What may still become a marker is held back, so text is at most a marker late. A call is given out when its arguments are
 * whole.
 */
import { ToolCallError } from "./errors.js";
import { dumped, idOf, type Arguments, type FieldSyntax } from "./tool-format.js";
import { isText, propertiesOf, resolved } from "./tool-grammar.js";
import {
  CHANNEL,
  END,
  escaped,
  ID_MARK,
  MARKS,
  MESSAGE,
  PREFIX_MARK,
  SPEAKER,
  START,
  type MarkedFormat,
} from "./tool-markup.js";
import { closedParameters, type Schema, type Tool } from "./tool-schema.js";

/** Text that is said, or the next piece of it. */
export interface TextPart {
  readonly kind: "text";
  readonly text: string;
}

/** A piece of a call under way. The pieces of one call joined are its arguments as JSON text. */
export interface ToolCallPart {
  readonly kind: "call_part";
  /** Which call of the turn, from 0 on. */
  readonly index: number;
  readonly id: string;
  readonly name: string;
  /** Empty in the first one, which says that the call has begun. */
  readonly arguments: string;
}

/** A call, whole. A is the type of its arguments. */
export interface ToolCall<A = Arguments> {
  readonly kind: "call";
  /** As the model wrote it, or drawn. */
  readonly id: string;
  readonly name: string;
  readonly arguments: A;
}

/** What a turn is made of. */
export type Part = TextPart | ToolCallPart | ToolCall;

/** @internal What a parser is made of. */
export interface Reading {
  readonly marked: MarkedFormat;
  readonly tools: ReadonlyMap<string, Tool<never>>;
  readonly decode: (ids: readonly number[]) => string;
  /** Ids of a text. Behind a token that is no text a decoder would take a space for one of its own. */
  readonly anchor: readonly number[];
  /** Ids that are shown as nothing. */
  readonly silent: ReadonlySet<number>;
  /** Ids that are shown as these texts. */
  readonly shown: ReadonlyMap<number, string>;
  readonly prefix: number | undefined;
}

type Steps<T> = Generator<undefined, T, undefined>;
type Begun = Pick<ToolCallPart, "id" | "index" | "name">;

const BROKEN = "\ufffd";
const ID_LENGTH = 9; // some templates take no other
const ID_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
const SCALAR = /^[^,\]}\s"{[]+/;

/** The tokens ended too early. */
class Cut extends ToolCallError {}

/** Reads the tokens of one turn. `Tools.parser` makes one. */
export class ToolCallParser {
  readonly #reading: Reading;
  readonly #words: Words;
  readonly #steps: Steps<never>;
  /** What is not read yet. */
  #rest = "";
  #isEnded = false;
  /** Of the call under way, as it was written. */
  #said = "";
  #parts: Part[] = [];
  #calls = 0;
  #missing = "";

  /** @internal */
  constructor(reading: Reading) {
    this.#reading = reading;
    this.#words = new Words(reading);
    this.#steps = this.#turn();
    this.#steps.next();
  }

  /** After the end: what the last call lacks of its markers; empty where it lacks none. */
  get missing(): string {
    return this.#missing;
  }

  /** What these tokens add. Throws ToolCallError for a call that is written wrongly. */
  feed(tokenIds: Iterable<number>): Part[] {
    for (const id of tokenIds) this.#rest += this.#words.push(id);
    return this.#goOn();
  }

  /** What was held back. Throws ToolCallError if the tokens end within a call. */
  finish(): Part[] {
    this.#rest += this.#words.end();
    this.#isEnded = true;
    return this.#goOn();
  }

  #goOn(): Part[] {
    try {
      this.#steps.next();
    } catch (error) {
      if (error instanceof ToolCallError) error.parts = joined(this.#parts);
      throw error;
    }
    const parts = this.#parts;
    this.#parts = [];
    return joined(parts);
  }

  // -- a turn -----------------------------------------------------------------------------------------------------------

  *#turn(): Steps<never> {
    if (this.#reading.marked.hasChannels) yield* this.#messages();
    else if (this.#reading.marked.trigger === "") yield* this.#perhapsCalls();
    while (yield* this.#text()) yield* this.#allCalls();
    for (;;) yield;
  }

  /** Messages with headers, to the end of the turn: reasoning is left out, all else is said or called. */
  *#messages(): Steps<void> {
    const { marked, tools } = this.#reading;
    const [message, end] = [marked.markers.marked(MESSAGE), marked.markers.marked(END)];
    for (;;) {
      let isPlain = false;
      while (!this.#rest.includes(message)) {
        isPlain ||= this.#isNoHeader();
        if (isPlain) this.#say(this.#rest.length);
        if (this.#isEnded) return;
        yield;
      }
      this.#said = "";
      this.#take(this.#rest.indexOf(message) + message.length);
      const receiver = / to=functions\.([\w.-]+)/.exec(this.#said)?.[1];
      if (receiver !== undefined) {
        if (!tools.has(receiver)) throw this.#wrong(`'${receiver}' is no tool`);
        const begun = this.#begin("", receiver);
        this.#give(begun, yield* this.#json(begun));
        continue;
      }
      const isReasoning = this.#said.includes(`${CHANNEL}analysis`);
      const pass = (count: number): void => {
        if (isReasoning) this.#take(count);
        else this.#say(count);
      };
      while (!this.#rest.includes(end)) {
        pass(this.#rest.length);
        if (this.#isEnded) return;
        yield;
      }
      pass(this.#rest.indexOf(end));
      this.#take(end.length);
    }
  }

  /** Is it what is said without a header? A model writes that if nothing holds it. */
  #isNoHeader(): boolean {
    const shown = this.#shown(this.#rest);
    const begins = [START, CHANNEL, END, SPEAKER, this.#reading.marked.begin];
    return !begins.some((each) => shown.startsWith(each) || each.startsWith(shown));
  }

  /** Text, up to what begins a call, or to the end. Does a call begin? */
  *#text(): Steps<boolean> {
    const { trigger } = this.#reading.marked;
    for (;;) {
      const at = trigger === "" ? -1 : this.#rest.indexOf(trigger);
      if (at >= 0) {
        this.#say(at);
        this.#take(trigger.length);
        return true;
      }
      this.#say(this.#rest.length - (this.#isEnded ? 0 : overlap(this.#rest, trigger)));
      if (this.#isEnded) return false;
      yield;
    }
  }

  /** Calls, if the turn begins with one. */
  *#perhapsCalls(): Steps<void> {
    const { marked, prefix, tools } = this.#reading;
    const begins = [...tools.keys()].map((name) => marked.begin + name + marked.middle);
    if (prefix !== undefined) {
      while (this.#rest === "" && !this.#isEnded) yield;
      if (this.#rest.startsWith(PREFIX_MARK)) this.#rest = this.#rest.slice(1);
    }
    while (!begins.some((each) => this.#rest.startsWith(each))) {
      if (this.#isEnded || !begins.some((each) => each.startsWith(this.#rest))) return;
      yield;
    }
    yield* this.#allCalls();
  }

  *#allCalls(): Steps<void> {
    const { marked } = this.#reading;
    this.#said = marked.markers.shown(marked.trigger);
    yield* this.#expect([marked.begin]);
    while (yield* this.#call()) this.#said = "";
    this.#said = "";
  }

  /** A call from its name on, and what is before the name of the next one. Is there one? */
  *#call(): Steps<boolean> {
    const { marked, tools } = this.#reading;
    const { fields, middle, end, between } = marked;
    const heads = new Map<string, string>();
    for (const name of tools.keys()) {
      for (const ending of fields === undefined ? [middle] : [middle, fields.empty]) heads.set(name + ending, name);
    }
    const [head, id] = yield* this.#expectWithId([...heads.keys()]);
    const name = heads.get(head) ?? "";
    const begun = this.#begin(id, name);
    if (fields !== undefined && head === name + fields.empty && head !== name + middle) {
      this.#add(begun, "{}");
      this.#give(begun, {});
      return yield* this.#isFollowed();
    }
    const values = yield* fields === undefined ? this.#json(begun) : this.#fields(fields, begun);
    // A call whose id follows its arguments is whole with it.
    const hasId = end.includes(ID_MARK);
    if (!hasId) this.#give(begun, values);
    const endings = between === undefined || fields !== undefined ? [end] : [between, end];
    const [ending, endId] = yield* this.#ending(endings);
    if (hasId) this.#give({ ...begun, id: endId === "" ? begun.id : endId }, values);
    return fields === undefined ? ending !== undefined && ending === between : yield* this.#isFollowed();
  }

  /** Between calls that are each whole: is there another one? */
  *#isFollowed(): Steps<boolean> {
    const { between } = this.#reading.marked;
    if (between === undefined) return false;
    while (!this.#rest.startsWith(between)) {
      if (this.#isEnded || !between.startsWith(this.#rest)) return false;
      yield;
    }
    this.#take(between.length);
    return true;
  }

  /** What stands behind the arguments; undefined where the tokens end before that is whole. */
  *#ending(endings: readonly string[]): Steps<[string | undefined, string]> {
    try {
      return yield* this.#expectWithId(endings);
    } catch (error) {
      const last = endings.at(-1) ?? "";
      const lacks = last.slice(this.#rest.length);
      if (!(error instanceof Cut) || !last.startsWith(this.#rest) || lacks.includes(ID_MARK)) throw error;
      this.#missing = this.#shown(lacks);
      this.#rest = "";
      return [undefined, ""];
    }
  }

  // -- arguments --------------------------------------------------------------------------------------------------------

  /** One JSON object. */
  *#json(begun: Begun): Steps<Arguments> {
    let [depth, isText, isEscaped, text] = [0, false, false, ""];
    for (;;) {
      for (let at = 0; at < this.#rest.length; at++) {
        const each = this.#rest.charAt(at);
        if (each.search(MARKS) === 0) throw this.#wrong("a marker stands in its arguments");
        if (isText) {
          isText = isEscaped || each !== '"';
          isEscaped = each === "\\" && !isEscaped;
        } else if (each === '"') isText = true;
        else if (each === "{" || each === "[") depth++;
        else if (each === "}" || each === "]") depth--;
        else if (depth === 0) throw this.#wrong("arguments are no JSON object");
        if (depth === 0) {
          const added = this.#take(at + 1);
          this.#add(begun, added);
          return this.#loaded(text + added) as Arguments;
        }
      }
      const added = this.#take(this.#rest.length);
      this.#add(begun, added);
      text += added;
      yield* this.#more();
    }
  }

  /** Arguments one by one, which are given out as JSON. */
  *#fields(syntax: FieldSyntax, begun: Begun): Steps<Arguments> {
    const { marked, tools } = this.#reading;
    const tool = tools.get(begun.name);
    const schema: Schema = tool === undefined ? {} : closedParameters(tool);
    const properties = propertiesOf(schema);
    const names = new Map(Object.keys(properties).map((name) => [name + syntax.afterName, name]));
    const found: Record<string, unknown> = {};
    for (;;) {
      const name = names.get(yield* this.#expect([...names.keys()])) ?? "";
      const of = resolved(properties[name], schema, name);
      const value: unknown = yield* syntax.hasJson ? this.#bare(syntax, of) : this.#braced(syntax);
      if (Object.hasOwn(found, name)) throw this.#wrong(`'${name}' is given twice`);
      this.#add(begun, `${Object.keys(found).length > 0 ? ", " : "{"}${JSON.stringify(name)}: ${dumped(value)}`);
      found[name] = value;
      if (!syntax.hasJson) yield* this.#expect([marked.tail]);
      if ((yield* this.#seen([syntax.between, marked.end])) === marked.end) {
        this.#add(begun, "}");
        return found;
      }
      yield* this.#expect([syntax.between]);
    }
  }

  /** A value in markup, and the tail behind it. */
  *#bare(syntax: FieldSyntax, schema: Schema): Steps<unknown> {
    yield* this.#expect([syntax.open]);
    const closing = syntax.close + this.#reading.marked.tail;
    for (let start = 0; ;) {
      let at;
      while ((at = this.#rest.indexOf(closing, start)) < 0) yield* this.#more();
      const text = this.#rest.slice(0, at);
      const value = isText(schema) ? (text === "null" && mayBeNull(schema) ? null : text) : parsed(text);
      if (value !== undefined) {
        this.#take(at + closing.length);
        return value;
      }
      start = at + 1; // it may be in a text of the JSON
    }
  }

  /** A value whose objects and lists are in braces. */
  *#braced(syntax: FieldSyntax): Steps<unknown> {
    while (this.#rest === "") yield* this.#more();
    if (this.#rest.startsWith(syntax.open)) {
      this.#take(syntax.open.length);
      let at;
      while ((at = this.#rest.indexOf(syntax.close)) < 0) yield* this.#more();
      const text = this.#take(at);
      this.#take(syntax.close.length);
      return text;
    }
    if (this.#rest.startsWith("[")) return yield* this.#listed(syntax);
    if (this.#rest.startsWith("{")) return yield* this.#object(syntax);
    for (;;) {
      const found = SCALAR.exec(this.#rest)?.[0];
      if (found === undefined) throw this.#wrong("a value is missing");
      if (found.length < this.#rest.length) return this.#loaded(this.#take(found.length));
      yield* this.#more();
    }
  }

  *#listed(syntax: FieldSyntax): Steps<unknown[]> {
    yield* this.#expect(["["]);
    const values: unknown[] = [];
    while ((yield* this.#seen(["]", ""])) !== "]") {
      if (values.length > 0) yield* this.#expect([","]);
      values.push(yield* this.#braced(syntax));
    }
    yield* this.#expect(["]"]);
    return values;
  }

  *#object(syntax: FieldSyntax): Steps<Record<string, unknown>> {
    yield* this.#expect(["{"]);
    const values: Record<string, unknown> = {};
    while ((yield* this.#seen(["}", ""])) !== "}") {
      if (Object.keys(values).length > 0) yield* this.#expect([syntax.between]);
      let at;
      while ((at = this.#rest.indexOf(syntax.afterName)) < 0) yield* this.#more();
      const name = this.#take(at);
      yield* this.#expect([syntax.afterName]);
      values[name] = yield* this.#braced(syntax);
    }
    yield* this.#expect(["}"]);
    return values;
  }

  // -- what is read -----------------------------------------------------------------------------------------------------

  /** Wait for more. Throws Cut at the end of the tokens. */
  *#more(): Steps<void> {
    if (this.#isEnded) {
      throw new Cut("the tokens end within a call; give it more maxTokens", this.#said + this.#shown(this.#rest));
    }
    yield;
  }

  /** The one of the texts that comes next, as soon as it can be no other; it is left there. */
  *#seen(texts: readonly string[]): Steps<string> {
    while (this.#rest === "") yield* this.#more();
    for (;;) {
      const possible = texts.filter((text) => text.startsWith(this.#rest) || this.#rest.startsWith(text));
      const [first] = possible;
      if (first === undefined) throw this.#wrong(`'${this.#shown(this.#rest).slice(0, 24)}' does not follow`);
      if (possible.length === 1 || this.#rest.startsWith(first)) return first;
      yield* this.#more();
    }
  }

  *#expect(texts: readonly string[]): Steps<string> {
    return (yield* this.#expectWithId(texts))[0];
  }

  /** The longest of the texts that comes next, which is taken, and the id in it. */
  *#expectWithId(texts: readonly string[]): Steps<[string, string]> {
    const longestFirst = [...texts].sort((one, other) => other.length - one.length);
    for (;;) {
      let isOpen = false;
      for (const text of longestFirst) {
        const found = withId(text).exec(this.#rest);
        if (found !== null && !isOpen) {
          this.#take(found[0].length);
          return [text, found[1] ?? ""];
        }
        isOpen ||= !this.#isEnded && mayBecome(text, this.#rest);
      }
      if (!isOpen) {
        if (this.#isEnded && texts.some((text) => mayBecome(text, this.#rest))) yield* this.#more();
        throw this.#wrong(`'${this.#shown(this.#rest.slice(0, 24))}' does not follow`);
      }
      yield;
    }
  }

  #take(count: number): string {
    const taken = this.#rest.slice(0, count);
    this.#rest = this.#rest.slice(count);
    this.#said += this.#shown(taken);
    return taken;
  }

  #say(count: number): void {
    const taken = this.#rest.slice(0, count);
    this.#rest = this.#rest.slice(count);
    // A marker that begins no call here is no text.
    const text = taken.replace(MARKS, "");
    if (text !== "") this.#parts.push({ kind: "text", text });
  }

  #begin(id: string, name: string): Begun {
    const begun = {
      index: this.#calls++,
      id: id === "" ? newCallId() : idOf(this.#reading.marked.callId, id, name),
      name,
    };
    this.#parts.push({ kind: "call_part", ...begun, arguments: "" });
    return begun;
  }

  #add(begun: Begun, text: string): void {
    if (text !== "") this.#parts.push({ kind: "call_part", ...begun, arguments: text });
  }

  #give({ id, name }: Begun, values: Arguments): void {
    this.#parts.push({ kind: "call", id, name, arguments: values });
  }

  #loaded(text: string): unknown {
    const value = parsed(text);
    if (value === undefined) throw this.#wrong("it is no JSON");
    return value;
  }

  #shown(marked: string): string {
    return this.#reading.marked.markers.shown(marked);
  }

  #wrong(problem: string): ToolCallError {
    const text = this.#said + this.#shown(this.#rest);
    return new ToolCallError(`the model wrote a tool call wrongly: ${problem} in '${text.slice(-120)}'`, text);
  }
}

/** Ids as text that grows by whole characters; some ids as a character of their own, some as nothing. */
class Words {
  readonly #reading: Reading;
  #ids: number[] = [];
  /** Decoding starts at the one; ids before the other have been given out. */
  #start = 0;
  #given = 0;

  constructor(reading: Reading) {
    this.#reading = reading;
  }

  push(id: number): string {
    const { marked, prefix, silent, shown, anchor } = this.#reading;
    const mark = (id === prefix ? PREFIX_MARK : marked.markers.markOf.get(id)) ?? (silent.has(id) ? "" : shown.get(id));
    if (mark !== undefined) {
      const before = this.end();
      this.#ids = [...anchor];
      this.#given = anchor.length;
      return before + mark;
    }
    this.#ids.push(id);
    const text = this.#added();
    if (text === "" || text.endsWith(BROKEN)) return "";
    [this.#start, this.#given] = [this.#given, this.#ids.length];
    return text;
  }

  /** The rest, with an incomplete character replaced. */
  end(): string {
    const text = this.#added();
    [this.#ids, this.#start, this.#given] = [[], 0, 0];
    return text;
  }

  #added(): string {
    const { decode } = this.#reading;
    const before = decode(this.#ids.slice(this.#start, this.#given));
    return decode(this.#ids.slice(this.#start)).slice(before.length).replace(MARKS, BROKEN);
  }
}

/** An id that every template takes. */
export function newCallId(): string {
  const drawn = globalThis.crypto.getRandomValues(new Uint32Array(ID_LENGTH));
  return Array.from(drawn, (each) => ID_LETTERS.charAt(each % ID_LETTERS.length)).join("");
}

/** Neighbouring pieces of one text or one call's arguments as one. */
function joined(parts: readonly Part[]): Part[] {
  const made: Part[] = [];
  for (const part of parts) {
    const last = made.at(-1);
    if (part.kind === "text" && last?.kind === "text") made[made.length - 1] = { ...part, text: last.text + part.text };
    else if (part.kind === "call_part" && last?.kind === "call_part" && last.arguments !== "") {
      made[made.length - 1] = { ...part, arguments: last.arguments + part.arguments };
    } else made.push(part);
  }
  return made;
}

/** How many characters at the end of the text could begin the marker. */
function overlap(text: string, marker: string): number {
  for (let count = Math.min(marker.length - 1, text.length); count > 0; count--) {
    if (text.endsWith(marker.slice(0, count))) return count;
  }
  return 0;
}

function withId(text: string): RegExp {
  const at = text.indexOf(ID_MARK);
  if (at < 0) return new RegExp(`^${escaped(text)}`);
  return new RegExp(`^${escaped(text.slice(0, at))}([a-zA-Z0-9_-]+)${escaped(text.slice(at + 1))}`);
}

/** Could what is there be the beginning of the text? */
function mayBecome(text: string, rest: string): boolean {
  const at = text.indexOf(ID_MARK);
  if (at < 0) return text.startsWith(rest);
  const [before, behind] = [text.slice(0, at), text.slice(at + 1)];
  if (rest.length <= before.length) return before.startsWith(rest);
  return rest.startsWith(before) && behind.startsWith(rest.slice(before.length).replace(/^[a-zA-Z0-9_-]+/, ""));
}

function mayBeNull(schema: Schema): boolean {
  const parts = Array.isArray(schema["anyOf"]) ? (schema["anyOf"] as Schema[]) : [];
  const kinds = [...parts, schema].map((each) => each["type"]);
  const isNullable = kinds.some((kind) => kind === "null" || (Array.isArray(kind) && kind.includes("null")));
  return isNullable || (Array.isArray(schema["enum"]) && schema["enum"].includes(null));
}

/** The value of a JSON text; undefined if it is none. */
function parsed(text: string): unknown {
  try {
    return JSON.parse(text) as unknown;
  } catch {
    return undefined;
  }
}
