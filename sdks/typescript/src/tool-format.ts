/**
 * How a model family writes tool calls, as its chat template has it.
 *
 * Families differ in markers and in how arguments are written, and models are trained on what their template makes of
 * earlier calls. So the template is asked: it renders calls of made-up names and values, and what stands between those is
 * the format.
 *
 *     <tool_call>\n{"name": "    NAME    ", "arguments": {…}    }\n</tool_call>
 *     begin                      name    middle      JSON     end
 *
 *     <tool_call>\n<function=    NAME    >\n<parameter=    FIELD    >\n    VALUE    \n</parameter>\n</function>…
 *     begin                      name    middle             name     after  value    end
 *
 * Between two calls the template writes `between`; one that cannot write two has none. `{{id}}` stands for a call's id.
 * Where a template writes ids and no names, an id holds the name: `functions.NAME:0`.
 */
import { TemplateError } from "./errors.js";
import type { Message } from "./openai-messages.js";

export const ID = "{{id}}";
const NAME = "{{name}}";
const NAMING_ID = `functions.${NAME}:${ID}`;

/** Arguments that are written one by one, each behind its name. */
export interface FieldSyntax {
  /** Between the name of an argument and its value. */
  readonly afterName: string;
  /** Between a value and the next argument's name. */
  readonly between: string;
  /** After the tool's name, where there are no arguments: to the call's end. */
  readonly empty: string;
  /** Before text, and `close` behind it. */
  readonly open: string;
  readonly close: string;
  /** Are objects and lists JSON? Else braces, with names and text as they are here. */
  readonly hasJson: boolean;
  /** Are they in the order of their names, not of the schema? */
  readonly isSorted: boolean;
}

/** How tool calls are written. `{{id}}` in `middle`, `between` and `end` stands for the id of the call there. */
export interface ToolFormat {
  /** Before the first call's name. */
  readonly begin: string;
  /** Between a tool's name and its arguments. */
  readonly middle: string;
  /** Behind the last call's arguments. */
  readonly end: string;
  /** From one call's arguments to the next one's name; undefined: one call only. */
  readonly between?: string | undefined;
  /** Undefined: arguments are one JSON object. */
  readonly fields?: FieldSyntax | undefined;
  /** In JSON; default `", "`. */
  readonly itemSeparator?: string | undefined;
  /** In JSON; default `": "`. */
  readonly keySeparator?: string | undefined;
  /** A result as a user's message, `{{result}}` in it; undefined: the template has a role for it. */
  readonly result?: string | undefined;
  /** A call's id, made of `{{name}}` and of a number, its `{{id}}`; undefined: `{{id}}` is all. */
  readonly callId?: string | undefined;
}

/** Arguments of a call, by their names. */
export type Arguments = Readonly<Record<string, unknown>>;

/** Formats for models whose template writes no calls. */
export const NAMED: Readonly<Record<string, ToolFormat>> = {
  hermes: {
    begin: '<tool_call>\n{"name": "',
    middle: '", "arguments": ',
    end: "}\n</tool_call>",
    between: '}\n</tool_call>\n<tool_call>\n{"name": "',
    result: "<tool_response>\n{{result}}\n</tool_response>",
  },
  llama: {
    begin: '{"name": "',
    middle: '", "parameters": ',
    end: "}",
    result: "The function answered: {{result}}",
  },
  code_block: {
    begin: '```json\n{"name": "',
    middle: '", "parameters": ',
    end: "}\n```",
    result: "```json\n{{result}}\n```",
  },
};

/** The template's text for messages, without the head of a next turn. Throws TemplateError as it does. */
export type Render = (messages: readonly Message[]) => string;

/** A call as it is given to a template: its id, name and arguments. */
export type Given = readonly [id: string, name: string, values: Arguments];

/** A format that a template has, and how it wants to be given calls. */
export interface TemplateFormat {
  readonly format: ToolFormat;
  /** The assistant's message with these calls. */
  readonly message: (calls: readonly Given[]) => Message;
}

// Values of which no template makes anything else, in this order of the alphabet.
const NAMES = ["kqzwxjvbm", "vhgtfyprd"] as const;
const IDS = ["k7q2zw9xj", "v3h8gt5fy"] as const;
const [FIRST, SECOND, WORD, INNER] = ["jqfield", "kqfield", "Zqvalue", "Yqvalue"] as const;
const NUMBERS = [
  [74611, 74612],
  [74613, 74614],
] as const;
const MARKER = "Kqzwxjvbm";
const USER: Message = { role: "user", content: "The quick brown fox" };

/** The format in which the template writes calls; undefined if it writes none, or in no way that is known here. */
export function findFormat(render: Render): TemplateFormat | undefined {
  const [head, end, more] = render([USER, { role: "assistant", content: MARKER }]).split(MARKER);
  if (head === undefined || end === undefined || more !== undefined) return undefined;
  for (const content of ["", null]) {
    for (const takesText of [false, true]) {
      const message = (calls: readonly Given[]): Message => calling(calls, content, takesText);
      const rendered = (calls: readonly Given[], areAnswered: boolean): string =>
        render([USER, message(calls), ...(areAnswered ? calls.map(answering) : [])]);
      for (const callId of [undefined, NAMING_ID]) {
        const format = new Probe(rendered, head, end, callId).format();
        if (format !== undefined) return { format: { ...format, callId }, message };
      }
    }
  }
  return undefined;
}

/** Something that has to be in a rendering is not. */
class NotThere extends Error {}

/** One way of giving a template calls, and what it writes for them. */
class Probe {
  constructor(
    /** The template's text for calls, and for these with results. */
    private readonly render: (calls: readonly Given[], areAnswered: boolean) => string,
    /** Before the assistant's words, and behind them. */
    private readonly head: string,
    private readonly end: string,
    /** As a format has it. */
    private readonly callId: string | undefined,
  ) {}

  format(): ToolFormat | undefined {
    const numbers = NUMBERS.map(([one, other]) => ({ [FIRST]: one, [SECOND]: other }));
    let written = this.written(numbers);
    const isAlone = written === undefined;
    written ??= this.written(numbers.slice(0, 1));
    if (written === undefined) return undefined;
    const [begin, , rest] = around(written, NAMES[0], "");
    if (begin.includes(ID) || begin.trim() === "") return undefined;
    try {
      return withJson(begin, rest, isAlone) ?? this.withFields(begin, rest, isAlone);
    } catch (error) {
      if (error instanceof NotThere) return undefined;
      throw error;
    }
  }

  private withFields(begin: string, rest: string, isAlone: boolean): ToolFormat | undefined {
    const [number, last] = NUMBERS[0];
    const [middle, afterName, end] = around(this.one({ [FIRST]: number }), FIRST, String(number));
    const [, between] = around(rest, String(number), SECOND);
    // Before the name of a further call: all of this one's end, and then that.
    const next = isAlone ? undefined : around(rest, String(last), NAMES[1])[1];
    const [, opened, closed] = around(this.one({ [FIRST]: WORD }), FIRST, WORD);
    if (!opened.startsWith(afterName) || !closed.endsWith(end)) return undefined;
    const [open, close] = [opened.slice(afterName.length), closed.slice(0, closed.length - end.length)];
    const before = middle + FIRST + afterName;
    const written = this.one({ [FIRST]: { [SECOND]: INNER } });
    if (!written.startsWith(before) || !written.endsWith(end)) return undefined;
    const nested = written.slice(before.length, written.length - end.length);
    const hasJson = nested === dumped({ [SECOND]: INNER });
    if (!hasJson && nested !== `{${SECOND}${afterName}${open}${INNER}${close}}`) return undefined;
    const backwards = this.one({ [SECOND]: 1, [FIRST]: 2 });
    const isSorted = backwards.indexOf(FIRST) < backwards.indexOf(SECOND);
    const fields = { afterName, between, empty: this.one({}), open, close, hasJson, isSorted };
    return { begin, middle, between: next?.startsWith(end) === true ? next : undefined, end, fields };
  }

  /** What follows the name of a call that is alone. */
  private one(values: Arguments): string {
    const written = this.written([values]);
    if (written === undefined) throw new NotThere();
    return around(written, NAMES[0], "")[2];
  }

  /** What is written of calls with these arguments, without what is around any words of the assistant. */
  private written(values: readonly Arguments[]): string | undefined {
    const calls = values.map((of, at): Given => {
      const name = NAMES[at] ?? "";
      return [idOf(this.callId, IDS[at] ?? "", name), name, of];
    });
    let found;
    try {
      const text = this.render(calls, false);
      if (calls.some(([, name]) => text.split(name).length !== 2)) return undefined;
      found = text.endsWith(this.end) ? text.slice(0, text.length - this.end.length) : this.withoutCue(text, calls);
    } catch (error) {
      if (error instanceof TemplateError) return undefined;
      throw error;
    }
    if (found === undefined) return undefined;
    found = found.slice(common(found, this.head));
    for (const id of IDS) found = found.replaceAll(id, ID);
    const places = calls.map(([, name]) => found.indexOf(name));
    return places.every((at, index) => at >= 0 && at >= (places[index - 1] ?? 0)) ? found : undefined;
  }

  /** The text without its last marker, where a template has the first one of the result in place of a turn's end. */
  private withoutCue(text: string, calls: readonly Given[]): string | undefined {
    const cue = /<[^<>\s]+>\s*$/.exec(text);
    return cue !== null && this.render(calls, true).startsWith(text) ? text.slice(0, cue.index) : undefined;
  }
}

/** Of the call of that name, the id. form: as a format has it. written: what stands for `{{id}}`. */
export function idOf(form: string | undefined, written: string, name: string): string {
  return form === undefined ? written : form.replaceAll(NAME, name).replaceAll(ID, written);
}

function withJson(begin: string, rest: string, isAlone: boolean): ToolFormat | undefined {
  const found = objectIn(rest, NUMBERS[0]);
  if (found === undefined) return undefined;
  const { before: middle, key: keySeparator, item: itemSeparator } = found;
  if (isAlone) return { begin, middle, end: found.behind, keySeparator, itemSeparator };
  const [between, , second] = around(found.behind, NAMES[1], "");
  const again = objectIn(second, NUMBERS[1]);
  if (again === undefined || again.before !== middle) return undefined;
  return { begin, middle, between, end: again.behind, keySeparator, itemSeparator };
}

/** A JSON object of the two fields and these numbers. */
function objectIn(
  text: string,
  [one, other]: readonly [number, number],
): { before: string; key: string; item: string; behind: string } | undefined {
  const pattern = `\\{"${FIRST}"(\\s*:\\s*)${one}(\\s*,\\s*)"${SECOND}"(\\s*:\\s*)${other}\\}`;
  const found = new RegExp(pattern).exec(text);
  if (found === null || found[1] !== found[3]) return undefined;
  const behind = text.slice(found.index + found[0].length);
  return { before: text.slice(0, found.index), key: found[1] ?? "", item: found[2] ?? "", behind };
}

function answering([id, name]: Given): Message {
  return { role: "tool", name, tool_call_id: id, content: WORD };
}

function calling(calls: readonly Given[], content: string | null, takesText: boolean): Message {
  return {
    role: "assistant",
    content,
    tool_calls: calls.map(([id, name, values]) => ({
      id,
      type: "function",
      function: { name, arguments: takesText ? dumped(values) : values },
    })),
  };
}

/** What is before, between and behind two texts. Throws NotThere unless both are there. */
function around(text: string, first: string, second: string): [string, string, string] {
  const start = text.indexOf(first);
  const then = text.indexOf(second, start + first.length);
  if (start < 0 || then < 0) throw new NotThere();
  return [text.slice(0, start), text.slice(start + first.length, then), text.slice(then + second.length)];
}

/** How many characters two texts begin with in common. */
export function common(one: string, other: string): number {
  let count = 0;
  while (count < Math.min(one.length, other.length) && one[count] === other[count]) count++;
  return count;
}

/** JSON as Python's `json.dumps` writes it. */
export function dumped(value: unknown, itemSeparator = ", ", keySeparator = ": "): string {
  if (Array.isArray(value)) {
    return `[${value.map((each) => dumped(each, itemSeparator, keySeparator)).join(itemSeparator)}]`;
  }
  if (typeof value === "object" && value !== null) {
    const entries = Object.entries(value).filter(([, each]) => each !== undefined);
    return `{${entries
      .map(([key, each]) => JSON.stringify(key) + keySeparator + dumped(each, itemSeparator, keySeparator))
      .join(itemSeparator)}}`;
  }
  return JSON.stringify(value);
}

/** A call as the format writes it, whose values are texts that describe them. */
export function example(of: ToolFormat, name: string, values: Readonly<Record<string, string>>): string {
  if (of.fields === undefined) {
    const written = dumped(values, of.itemSeparator ?? ", ", of.keySeparator ?? ": ");
    return `${of.begin}${name}${of.middle}${written}${of.end}`.replaceAll(ID, "ID");
  }
  const { afterName, between, open, close } = of.fields;
  const fields = Object.entries(values).map(([key, value]) => `${key}${afterName}${open}${value}${close}`);
  return `${of.begin}${name}${of.middle}${fields.join(between)}${of.end}`.replaceAll(ID, "ID");
}
