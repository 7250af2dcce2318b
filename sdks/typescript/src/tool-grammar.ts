/**
 * What a model may write when it has tools, as a grammar in llguidance's variant of Lark.
 *
 *     auto        start: said calls?              text, and calls wherever a marker begins one
 *     required    start: thought? calls
 *     none        start: said                     no marker
 *     calls       a tool's name, then arguments that fit its schema, and so on
 *
 * `<[7]>` is the token of that id, and nothing that spells it.
 */
import { shown } from "./checks.js";
import { InvalidTool } from "./errors.js";
import { dumped, type FieldSyntax, type ToolFormat } from "./tool-format.js";
import { CHANNEL, CONSTRAIN, END, ID_MARK, MESSAGE, SPEAKER, START, type MarkedFormat } from "./tool-markup.js";
import { closedParameters, isObject, type Schema, type Tool } from "./tool-schema.js";

const CALL_ID = "[a-zA-Z0-9]{9}";
const CALL_NUMBER = "[0-9]{1,4}";
const ANY = "(.|\\n)";
const NO_RULES = ["title", "description", "default", "examples", "$schema", "$defs", "definitions", "format"];
const OF_FIELDS = [...NO_RULES, "type", "properties", "required", "additionalProperties", "x-guidance"];
const OF_TEXT = [...NO_RULES, "type", "minLength", "maxLength", "pattern"];
const NUMERIC = ["type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];

/** Markers of what the model says to itself before it calls, and their ids, if they are tokens. */
export interface Thinking {
  readonly begin: string;
  readonly end: string;
  readonly beginId: number | undefined;
  readonly endId: number | undefined;
  /** Does the prompt end within it? */
  readonly isOpen: boolean;
}

/** What a grammar is to allow. */
export interface Allowed {
  /** The tools that can be called: none of them if there are none. */
  readonly tools: readonly Tool<never>[];
  /** Text, or text before calls. */
  readonly maySay: boolean;
  readonly isParallel: boolean;
  /** Ids of tokens that are no text and may stand in it. */
  readonly others: readonly number[];
  /** Of all tools, also of those that are not called. */
  readonly names: readonly string[];
  /** An id that may stand before a call that has to be the first thing. */
  readonly prefix: number | undefined;
  readonly thinking: Thinking | undefined;
}

/** The grammar. Throws InvalidTool for a schema that the format cannot hold. */
export function grammarOf(given: ToolFormat, marked: MarkedFormat, allowed: Allowed): string {
  return new Grammar(given, marked, allowed).whole();
}

/** Is the value written as bare text? Text that may be null is. */
export function isText(schema: Schema): boolean {
  const kinds = kindsOf(schema);
  return kinds.has("string") && [...kinds].every((kind) => kind === "string" || kind === "null");
}

/** The schema itself, or what its reference within `root` names. */
export function resolved(schema: unknown, root: Schema, path: string): Schema {
  let found = schema;
  for (let seen = 0; isObject(found) && "$ref" in found; seen++) {
    const name = String(found["$ref"]);
    found = root;
    for (const part of name.replace(/^#?\/*/, "").split("/")) found = isObject(found) ? found[part] : undefined;
    if (!name.startsWith("#") || found === undefined || seen > 99) {
      throw new InvalidTool(path, `refers to '${name}', which is not in the schema`);
    }
  }
  if (!isObject(found)) throw new InvalidTool(path, `must be a schema, got ${shown(found)}`);
  return found;
}

class Grammar {
  readonly #rules = new Map<string, string>();
  readonly #objects = new Map<string, string>();
  readonly #others: string;

  constructor(
    private readonly given: ToolFormat,
    private readonly marked: MarkedFormat,
    private readonly allowed: Allowed,
  ) {
    this.#others = ranges(allowed.others);
  }

  whole(): string {
    const { tools, maySay, prefix, thinking } = this.allowed;
    const { trigger, markers } = this.marked;
    const calls = tools.length > 0 ? this.#calls() : "";
    const tag = prefix === undefined ? "" : `<[${prefix}]>? `;
    let start;
    if (this.marked.hasChannels) {
      start = this.#channelled(calls);
    } else if (!maySay) {
      const before = thinking === undefined || trigger === "" ? "" : this.#thought(thinking);
      start = `${before}${tag}${this.#literal(trigger)} ${calls}`;
    } else if (trigger === "") {
      start = this.#said(this.#unlikeCalls()) + (calls === "" ? "" : ` | ${tag}${calls}`);
    } else if (markers.idOf.has(trigger)) {
      this.#set("TEXT", `/${ANY}+/`);
      start = this.#said("TEXT") + (calls === "" ? "" : ` (${this.#literal(trigger)} ${calls})?`);
    } else {
      this.#set("TEXT", `/${ANY}+/ & ~/${ANY}*${inRust(trigger)}${ANY}*/`);
      if (calls === "") start = this.#said("TEXT");
      else {
        this.#set(`head[suffix=${quoted(trigger)}]`, `/${ANY}*/`);
        this.#said("TEXT");
        start = `${this.#others === "" ? "" : `(TEXT? ${this.#other()})* `}(TEXT | head ${calls})?`;
      }
    }
    return [`start: ${start}`, ...[...this.#rules].map(([name, body]) => `${name}: ${body}`)].join("\n") + "\n";
  }

  // -- text -------------------------------------------------------------------------------------------------------------

  /** Text, with other tokens in it. first: the rule of the text before the first of these. */
  #said(first: string): string {
    if (first !== "TEXT") this.#set("TEXT", `/${ANY}+/`);
    return this.#others === "" ? `${first}?` : `${first}? (${this.#other()} TEXT?)*`;
  }

  #other(): string {
    return this.#set("other", `<[${this.#others}]>`);
  }

  /** Text that does not begin as a call of one of the tools. */
  #unlikeCalls(): string {
    const { begin, middle } = this.marked;
    if (this.allowed.names.length === 0) return this.#set("TEXT", `/${ANY}+/`);
    const begins = `${inRust(begin)}(${this.allowed.names.map(inRust).join("|")})${inRust(middle)}`;
    return this.#set("FIRST", `/${ANY}+/ & ~/${begins}${ANY}*/`);
  }

  /** What the model says to itself, and then a few line ends. */
  #thought({ begin, end, beginId, endId, isOpen }: Thinking): string {
    this.#set("GAP", "/[ \\n]{1,4}/");
    let thought;
    if (endId === undefined) {
      this.#set(`thought[suffix=${quoted(end)}]`, `/${ANY}*/`);
      thought = "thought GAP?";
    } else {
      this.#set("TEXT", `/${ANY}+/`);
      const others = ranges(this.allowed.others.filter((id) => id !== beginId && id !== endId));
      thought = `${others === "" ? "TEXT?" : `TEXT? (<[${others}]> TEXT?)*`} <[${endId}]> GAP?`;
    }
    if (isOpen) return `${thought} `;
    return `(${beginId === undefined ? quoted(begin) : `<[${beginId}]>`} ${thought})? `;
  }

  /**
   * Messages of reasoning and asides, and then a call, or the answer. A call is written as the template has it, or with
   * its receiver behind the channel, as models do.
   */
  #channelled(calls: string): string {
    const { tools, maySay } = this.allowed;
    this.#set("TEXT", `/${ANY}+/`);
    const headed = (text: string): string => this.#literal(this.marked.markers.marked(text));
    const next = headed(`${END}${START}${SPEAKER}`);
    const before = ["analysis", "commentary"].map((each) => `${headed(`${CHANNEL}${each}${MESSAGE}`)} TEXT? ${next}`);
    const lasts = maySay ? [`${headed(`${CHANNEL}final${MESSAGE}`)} TEXT?`] : [];
    if (calls !== "") {
      const begin = this.#literal(`${this.marked.markers.marked(`${CHANNEL}commentary`)}${this.marked.begin}`);
      const middle = headed(` ${CONSTRAIN}json${MESSAGE}`);
      lasts.push(calls, `${begin} ${oneOf(tools.map(({ name }, at) => `${quoted(name)} ${middle} arguments_${at}`))}`);
    }
    return `(${before.join(" | ")})* (${lasts.join(" | ")})${maySay ? "?" : ""}`;
  }

  // -- calls ------------------------------------------------------------------------------------------------------------

  #calls(): string {
    const { begin, between, end, fields } = this.marked;
    const bodies = this.allowed.tools.map((tool, at) => this.#body(tool, `arguments_${at}`));
    const first = oneOf(bodies.map(([head, body]) => `${this.#literal(begin + head)} ${body}`));
    const ending = fields === undefined ? ` ${this.#literal(end)}` : "";
    if (between === undefined || !this.allowed.isParallel) return `(${first})${ending}`;
    const more = oneOf(bodies.map(([head, body]) => `${this.#literal(between + head)} ${body}`));
    return `(${first}) (${more})*${ending}`;
  }

  /** What is written of a tool's call: its name, and what follows it up to the arguments; and these. */
  #body(tool: Tool<never>, rule: string): [string, string] {
    const parameters = closedParameters(tool);
    const { fields, middle, end } = this.marked;
    if (fields === undefined) return [tool.name + middle, this.#set(rule, this.#json(parameters))];
    const path = `${tool.name}.parameters`;
    refuse(parameters, OF_FIELDS, path);
    const value = (name: string): string => {
      const place = `${path}.${name}`;
      const held = resolved(propertiesOf(parameters)[name], parameters, place);
      if (fields.hasJson) return this.#bare(fields, held, parameters, place);
      return `${this.#braced(fields, held, parameters, place)} ${this.#literal(this.marked.tail)}`;
    };
    const around = { before: middle, end, empty: fields.empty };
    return [tool.name, this.#set(rule, this.#optionalFields(fields, parameters, rule, path, around, value))];
  }

  /** Fields in their order, those that are not required or left out. value: a field's rule, by its name. */
  #optionalFields(
    syntax: FieldSyntax,
    schema: Schema,
    rule: string,
    path: string,
    around: { readonly before: string; readonly end: string; readonly empty: string },
    value: (name: string) => string,
  ): string {
    const names = Object.keys(propertiesOf(schema));
    if (syntax.isSorted) names.sort(byCodePoints);
    const required = new Set(schema["required"] as readonly string[] | undefined);
    const lacking = [...required].filter((name) => !names.includes(name)).sort(byCodePoints);
    if (lacking.length > 0) throw new InvalidTool(path, `requires ${lacking.join(", ")}, of which it says nothing`);
    for (const name of names) {
      if (name === "" || /[\s<>{}:,"[\]=]/.test(name)) {
        throw new InvalidTool(`${path}.${name}`, "is no name that this model's format can hold");
      }
    }
    // Behind a field, and at the beginning: from the last field on.
    let [later, first] = [this.#literal(around.end), this.#literal(around.empty)];
    for (let at = names.length - 1; at >= 0; at--) {
      const name = names[at] ?? "";
      const written = `${this.#literal(name + syntax.afterName)} ${value(name)}`;
      const laterRule = this.#set(`${rule}_after_${at}`, later);
      const began = `${this.#literal(around.before)} ${written} ${laterRule}`;
      const wentOn = `${this.#literal(syntax.between)} ${written} ${laterRule}`;
      first = required.has(name) ? began : `${began} | ${this.#set(`${rule}_first_${at}`, first)}`;
      later = required.has(name) ? wentOn : `${wentOn} | ${laterRule}`;
    }
    return first;
  }

  /** A value in markup: text as it is, anything else as JSON. With what follows each. */
  #bare(syntax: FieldSyntax, schema: Schema, root: Schema, path: string): string {
    const { tail } = this.marked;
    if (listedValues(schema) !== undefined) return `${this.#values(syntax, schema)} ${this.#literal(tail)}`;
    if (isText(schema)) return this.#text(syntax, textRules(schema, path), path, tail);
    return `${this.#set(`value_${this.#rules.size}`, this.#json(schema, root))} ${this.#literal(tail)}`;
  }

  /** Text between what opens and closes it, and the tail behind it. */
  #text(syntax: FieldSyntax, schema: Schema, path: string, tail: string): string {
    const { idOf } = this.marked.markers;
    const body = patternOf(schema, path);
    const closing = syntax.close + tail;
    if (idOf.has(closing.charAt(0))) {
      const name = this.#set(`TEXT_${this.#rules.size}`, `/${body}/`);
      const mayBeEmpty = !isPositive(schema["minLength"]) && !("pattern" in schema);
      return `${this.#literal(syntax.open)} ${name}${mayBeEmpty ? "?" : ""} ${this.#literal(closing)}`;
    }
    const mark = closing.split("").findIndex((each) => idOf.has(each));
    const until = mark < 0 ? closing.length : mark;
    const name = `text_${this.#rules.size}`;
    this.#set(`${name}[suffix=${quoted(closing.slice(0, until))}]`, `/${body}/`);
    return `${this.#literal(syntax.open)} ${name} ${this.#literal(closing.slice(until))}`;
  }

  /** A value whose objects and lists are in braces, and whose texts are between tokens. */
  #braced(syntax: FieldSyntax, schema: Schema, root: Schema, path: string): string {
    if (listedValues(schema) !== undefined) return this.#values(syntax, schema);
    for (const union of ["anyOf", "oneOf"]) {
      const parts = schema[union];
      if (!Array.isArray(parts)) continue;
      refuse(schema, [...NO_RULES, union], path);
      return oneOf(parts.map((each) => this.#braced(syntax, resolved(each, root, path), root, path)));
    }
    const kind = schema["type"];
    if (Array.isArray(kind)) {
      return oneOf(kind.map((each: unknown) => this.#braced(syntax, { ...schema, type: each }, root, path)));
    }
    switch (kind) {
      case "string":
        return this.#text(syntax, textRules(schema, path), path, "");
      case "integer":
      case "number":
      case "boolean":
      case "null": {
        const numeric = Object.fromEntries(Object.entries(schema).filter(([name]) => NUMERIC.includes(name)));
        return this.#set(`value_${this.#rules.size}`, this.#json(numeric));
      }
      case "array":
        return this.#listed(syntax, schema, root, path);
      case "object":
        return this.#object(syntax, schema, root, path);
      default:
        throw new InvalidTool(path, "says no type, and this model's format writes each in a way of its own");
    }
  }

  /** One of the values that a schema lists. */
  #values(syntax: FieldSyntax, schema: Schema): string {
    return oneOf(
      (listedValues(schema) ?? []).map((each) =>
        this.#literal(typeof each === "string" ? `${syntax.open}${each}${syntax.close}` : dumped(each)),
      ),
    );
  }

  #listed(syntax: FieldSyntax, schema: Schema, root: Schema, path: string): string {
    refuse(schema, [...NO_RULES, "type", "items", "minItems", "maxItems"], path);
    const rule = `list_${this.#rules.size}`;
    this.#set(rule, "");
    const of = this.#braced(syntax, resolved(schema["items"], root, path), root, path);
    const item = this.#set(`${rule}_item`, of);
    const least = Number(schema["minItems"] ?? 0);
    const most = schema["maxItems"] === undefined ? undefined : Number(schema["maxItems"]);
    const more = `{${Math.max(least - 1, 0)},${most === undefined ? "" : Math.max(most - 1, 0)}}`;
    const items = `${item} ("," ${item})${more}`;
    this.#rules.set(rule, most === 0 ? '"[]"' : `"[" (${items})${least === 0 ? "?" : ""} "]"`);
    return rule;
  }

  #object(syntax: FieldSyntax, schema: Schema, root: Schema, path: string): string {
    refuse(schema, OF_FIELDS, path);
    if (Object.keys(propertiesOf(schema)).length === 0) {
      throw new InvalidTool(path, "lists no properties, and this model's format holds no others");
    }
    // One that refers to itself is met again.
    const key = JSON.stringify(schema);
    const known = this.#objects.get(key);
    if (known !== undefined) return known;
    const rule = `object_${this.#rules.size}`;
    this.#objects.set(key, rule);
    this.#set(rule, "");
    const value = (name: string): string =>
      this.#braced(syntax, resolved(propertiesOf(schema)[name], root, path), root, path);
    const around = { before: "{", end: "}", empty: "{}" };
    this.#rules.set(rule, this.#optionalFields(syntax, schema, rule, path, around, value));
    return rule;
  }

  // -- writing ----------------------------------------------------------------------------------------------------------

  #set(name: string, body: string): string {
    this.#rules.set(name, body);
    return name;
  }

  /** A text with marks, as a sequence of texts and tokens. */
  #literal(marked: string): string {
    const parts: string[] = [];
    let text = "";
    const { idOf } = this.marked.markers;
    for (const each of marked.split("")) {
      const id = idOf.get(each);
      if (id === undefined && each !== ID_MARK) {
        text += each;
        continue;
      }
      if (text !== "") parts.push(quoted(text));
      const callId = this.marked.callId === undefined ? CALL_ID : CALL_NUMBER;
      parts.push(id === undefined ? this.#set("CALL_ID", `/${callId}/`) : `<[${id}]>`);
      text = "";
    }
    return [...parts, ...(text === "" ? [] : [quoted(text)])].join(" ");
  }

  #json(schema: Schema, root: Schema = {}): string {
    const spelling = {
      whitespace_flexible: false,
      item_separator: this.given.itemSeparator ?? ", ",
      key_separator: this.given.keySeparator ?? ": ",
    };
    const shared = Object.fromEntries(
      ["$defs", "definitions"].filter((name) => name in root).map((name) => [name, root[name]]),
    );
    return `%json ${dumped({ "x-guidance": spelling, ...shared, ...schema })}`;
  }
}

function oneOf(bodies: readonly string[]): string {
  return `(${[...new Set(bodies)].join(" | ")})`;
}

export function propertiesOf(schema: Schema): Readonly<Record<string, unknown>> {
  return isObject(schema["properties"]) ? schema["properties"] : {};
}

/** The values that a schema lists, if it does. */
function listedValues(schema: Schema): readonly unknown[] | undefined {
  if (Array.isArray(schema["enum"])) return schema["enum"] as unknown[];
  return "const" in schema ? [schema["const"]] : undefined;
}

/** The types that a schema names; none where it names none for all of its values. */
function kindsOf(schema: Schema): Set<string> {
  const values = listedValues(schema);
  if (values !== undefined) {
    return new Set(values.map((each) => (typeof each === "string" ? "string" : each === null ? "null" : "other")));
  }
  if (Array.isArray(schema["anyOf"])) {
    const parts = schema["anyOf"].map((each) => (isObject(each) ? kindsOf(each) : new Set<string>()));
    return parts.every((part) => part.size > 0) ? new Set(parts.flatMap((part) => [...part])) : new Set();
  }
  const kind = schema["type"];
  if (Array.isArray(kind)) return new Set(kind.map(String));
  return new Set(typeof kind === "string" ? [kind] : []);
}

/** What a schema says of text that may be null. */
function textRules(schema: Schema, path: string): Schema {
  let rules = schema;
  if (Array.isArray(schema["anyOf"])) {
    refuse(schema, [...NO_RULES, "anyOf"], path);
    const texts = (schema["anyOf"] as Schema[]).filter((each) => [...kindsOf(each)].join() !== "null");
    const [only] = texts;
    if (only === undefined || texts.length !== 1 || listedValues(only) !== undefined) {
      throw new InvalidTool(path, "is a choice between texts, which this model's format cannot hold; use an enum");
    }
    rules = only;
  }
  refuse(rules, OF_TEXT, path);
  return rules;
}

/** A regular expression of the text. */
function patternOf(schema: Schema, path: string): string {
  const [pattern, least, most] = [schema["pattern"], schema["minLength"], schema["maxLength"]];
  const isBounded = isPositive(least) || most !== undefined;
  if (typeof pattern !== "string") {
    return isBounded ? `${ANY}{${Number(least ?? 0)},${most === undefined ? "" : Number(most)}}` : `${ANY}*`;
  }
  const begun = pattern.startsWith("^") ? pattern.slice(1) : pattern;
  const isEnded = begun.endsWith("$") && !begun.endsWith("\\$");
  const inner = isEnded ? begun.slice(0, -1) : begun;
  if (isBounded || /(?<!\\)[$]|(?<![\\[])\^|\(\?/.test(inner)) {
    throw new InvalidTool(
      path,
      `has the pattern '${pattern}' of a kind, or with a length, that text cannot be held to`,
    );
  }
  return `${pattern.startsWith("^") ? "" : `${ANY}*`}(${inner.replaceAll("/", "\\/")})${isEnded ? "" : `${ANY}*`}`;
}

function isPositive(value: unknown): boolean {
  return typeof value === "number" && value > 0;
}

function refuse(schema: Schema, known: readonly string[], path: string): void {
  const unknown = Object.keys(schema).filter((name) => !known.includes(name));
  if (unknown.length === 0) return;
  const names = unknown.sort(byCodePoints).join(", ");
  throw new InvalidTool(path, `has ${names}, which this model's format cannot be held to; leave it out`);
}

function quoted(text: string): string {
  return JSON.stringify(text);
}

/** Of a regular expression in Rust's syntax, between slashes. */
function inRust(text: string): string {
  return text.replace(/[\\.+*?()|[\]{}^$/&~#-]/g, "\\$&").replaceAll("\n", "\\n");
}

function ranges(ids: readonly number[]): string {
  const found: [number, number][] = [];
  for (const id of [...new Set(ids)].sort((one, other) => one - other)) {
    const last = found.at(-1);
    if (last?.[1] === id - 1) last[1] = id;
    else found.push([id, id]);
  }
  return found.map(([first, last]) => (last > first ? `${first}-${last}` : `${first}`)).join(",");
}

/** As Python orders texts. */
function byCodePoints(one: string, other: string): number {
  const [left, right] = [Array.from(one), Array.from(other)];
  for (let at = 0; at < Math.min(left.length, right.length); at++) {
    const difference = (left[at]?.codePointAt(0) ?? 0) - (right[at]?.codePointAt(0) ?? 0);
    if (difference !== 0) return difference;
  }
  return left.length - right.length;
}
