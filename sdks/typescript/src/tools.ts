/**
 * Tool calls, on the client's side: in the model's own format, held to each tool's schema, read as they are written.
 *
 *     const tools = new Tools([{ name: "add", parameters: {…}, run: ({ a, b }) => a + b }], tokenizer);
 *     await session.append(tools.tokensForChat([{ role: "user", content: "What is 30 + 12?" }]));
 *     const turn = session.generate(256, { constraint: tools.constraint("required") });
 *     for await (const part of tools.parts(turn)) {                // text, pieces of calls, and each call when it is whole
 *       if (part.kind === "call") results.push(await tools.call(part));
 *     }
 *     await session.append(tools.tokensForNextTurn(results, { after: turn.tokenIds }));
 *
 * The format is found from the tokenizer's chat template, by what it makes of a call. The constraint has it, and the schema
 * of every tool, so a call that was not cut can be parsed and fits its schema. Markers that are tokens of their own are
 * written and found by their id: text that reads like one begins no call.
 */
import {
  idsAfter,
  markersFor,
  render,
  specialTokensOf,
  tokensForChat,
  tokensForNextTurn,
  type ChatOptions,
  type ChatTokenizer,
  type NextTurnOptions,
  type Spoken,
  type TemplateOptions,
} from "./chat-tokens.js";
import { booleanOf, invalid, shown } from "./checks.js";
import type { Lark } from "./constraints.js";
import { InvalidMessages, InvalidTool, TemplateError, ToolFormatUnknown } from "./errors.js";
import type { Message } from "./openai-messages.js";
import { known } from "./options.js";
import { dumped, example, findFormat, ID, NAMED, type TemplateFormat, type ToolFormat } from "./tool-format.js";
import { grammarOf, type Thinking } from "./tool-grammar.js";
import { markedFormat, type MarkedFormat } from "./tool-markup.js";
import { newCallId, ToolCallParser, type Part, type ToolCall } from "./tool-parser.js";
import { isObject, schemaOf, toolFrom, type Tool, type ToolDefinition } from "./tool-schema.js";

export type { Arguments, FieldSyntax, ToolFormat } from "./tool-format.js";
export { ToolCallParser, type Part, type TextPart, type ToolCall, type ToolCallPart } from "./tool-parser.js";
export { toolFrom, type SaysSchema, type Schema, type Tool, type ToolDefinition } from "./tool-schema.js";

/** How tools are offered. */
export interface ToolsOptions {
  /**
   * For a template that writes no calls: `"hermes"`, `"llama"`, `"code_block"`, or one of your own. Then the tools are
   * described in the system message.
   */
  readonly format?: "hermes" | "llama" | "code_block" | ToolFormat | undefined;
  /** What the chat template takes besides. */
  readonly templateOptions?: TemplateOptions | undefined;
}

/** How a conversation with tools is rendered. */
export interface ToolsChatOptions {
  /** End with the head of the assistant's turn. Default true. */
  readonly addGenerationPrompt?: boolean | undefined;
  /** Text in messages, tools and options that reads like a special token becomes that token. Default false. */
  readonly allowSpecialTokens?: boolean | undefined;
}

/** How a next turn with tools is rendered. */
export interface ToolsNextTurnOptions extends ToolsChatOptions {
  /** The tokens generated last, the end token included if the model came to it. */
  readonly after: readonly number[];
}

/** What a constraint permits. */
export interface ToolConstraintOptions {
  /** May there be several calls, where the format can have them? Default true. */
  readonly parallel?: boolean | undefined;
}

/** What a tool answered to a call, for the model to read. */
export interface ToolResult {
  readonly call: ToolCall;
  readonly content: string;
  /** The function threw; `content` says what. */
  readonly isError?: boolean | undefined;
}

/** What was said in one turn, and called. */
export interface ToolsTurn {
  readonly text: string;
  readonly calls: readonly ToolCall[];
}

const CHOICES = ["auto", "required", "none"];
const PYTHON_TAG = "<|python_tag|>";
const [THINK, THOUGHT] = ["<think>", "</think>"];

/** Tools in the format of one tokenizer's chat template. */
export class Tools {
  /** The tools, by name. */
  readonly tools: ReadonlyMap<string, Tool<never>>;
  /** How calls are written. */
  readonly format: ToolFormat;
  readonly #tokenizer: ChatTokenizer;
  readonly #options: TemplateOptions;
  readonly #ofTemplate: TemplateFormat | undefined;
  readonly #marked: MarkedFormat;
  readonly #showsTools: boolean;
  readonly #prefix: number | undefined;

  /**
   * tools: `{ name, description, parameters, run }`, definitions as the OpenAI or the Anthropic API has them, or `Tool`s.
   *
   * Throws ToolFormatUnknown if the template writes no calls that can be read again, InvalidTool for a tool.
   */
  constructor(tools: readonly (Tool<never> | ToolDefinition)[], tokenizer: ChatTokenizer, options: ToolsOptions = {}) {
    const { format, templateOptions = {} } = known(options, "Tools");
    const made = tools.map((tool) => {
      const run = (tool as Tool<never>).function;
      return typeof run === "function"
        ? { ...toolFrom({ ...tool, function: undefined }), function: run }
        : toolFrom(tool);
    });
    this.tools = new Map(made.map((tool) => [tool.name, tool]));
    for (const [at, { name }] of made.entries()) {
      if (CHOICES.includes(name)) throw new InvalidTool(name, "is what a choice of tools is called; name it otherwise");
      if (made.findIndex((other) => other.name === name) !== at)
        throw new InvalidTool(name, "is the name of two tools");
    }
    this.#tokenizer = tokenizer;
    this.#options = templateOptions;
    const isKnown =
      typeof format === "string" ? Object.hasOwn(NAMED, format) : format === undefined || isObject(format);
    if (!isKnown) {
      throw invalid("format", `must be one of ${Object.keys(NAMED).join(", ")}, or a ToolFormat, got ${shown(format)}`);
    }
    const found = format === undefined ? findFormat((messages) => this.#rendered(messages)) : undefined;
    const chosen = found?.format ?? (typeof format === "string" ? NAMED[format] : format);
    if (chosen === undefined) throw new ToolFormatUnknown(unknownFormat(tokenizer));
    this.#ofTemplate = found;
    this.format = chosen;
    this.#marked = markedFormat(chosen, specialTokensOf(tokenizer).ids);
    this.#showsTools = found !== undefined && this.#areShown();
    const tag = tokenizer.addedTokens.find(({ text }) => text === PYTHON_TAG)?.id;
    this.#prefix = this.#marked.trigger === "" ? tag : undefined;
  }

  /** The tools as chat templates and the OpenAI API take them. */
  get schemas(): Record<string, unknown>[] {
    return [...this.tools.values()].map(schemaOf);
  }

  /** Can one turn hold several calls? */
  get isParallel(): boolean {
    return this.format.between !== undefined;
  }

  /** What a system message says of the tools; empty where the chat template says it. */
  get instructions(): string {
    if (this.#showsTools || this.tools.size === 0) return "";
    const described = this.schemas.map((schema) => dumped(schema["function"])).join("\n");
    const said = `You can call these functions:\n<tools>\n${described}\n</tools>`;
    // In a message a marker is text, and no example of the token.
    if (this.#marked.markers.idOf.size > 0) return said;
    const written = example(this.format, "NAME", { PARAMETER: "VALUE" });
    return `${said}\n\nTo call one, write its name and its arguments in this form:\n${written}`;
  }

  // -- what is said to the model -----------------------------------------------------------------------------------------

  /**
   * The ids of a conversation that starts a session, and of the tools. As `tokensForChat` of
   * `@kakeya/runtime/tokenization`; where the template does not show tools, they are described in the system message.
   */
  tokensForChat(messages: readonly Message[], options: ToolsChatOptions = {}): number[] {
    const { instructions } = this;
    const said = instructions === "" ? messages : withSystem(messages, instructions);
    return tokensForChat(said, this.#tokenizer, { ...options, ...this.#chatOptions() });
  }

  /**
   * The ids to append for the next turn: results of the calls that were made last, in their order, and messages.
   *
   * As `tokensForNextTurn` of `@kakeya/runtime/tokenization`: only what is new, and what the tokens of `after` lack of the
   * turn's end, a call's markers included. Throws InvalidMessages if a call has no result, ToolCallError if the last turn
   * was cut within a call: rewind the session to before it.
   */
  tokensForNextTurn(said: readonly (ToolResult | Message)[], options: ToolsNextTurnOptions): number[] {
    const results = said.filter(isResult);
    const parser = this.parser();
    const calls = [...parser.feed(options.after), ...parser.finish()].filter((part) => part.kind === "call");
    const answered = results.map(({ call }) => call);
    if (namesOf(calls) !== namesOf(answered)) {
      throw new InvalidMessages(
        "results",
        `must be one for each call, in their order: ${namesOf(calls)} called, and there are results of ` +
          namesOf(answered),
      );
    }
    const missing = this.#encoded(parser.missing);
    const asked = { ...options, ...this.#chatOptions(), after: [...options.after, ...missing] };
    const messages = asMessages(said, this.format);
    if (results.length === 0 || this.#ofTemplate === undefined) {
      return [...missing, ...tokensForNextTurn(messages, this.#tokenizer, asked)];
    }
    return [...missing, ...this.#afterCalls(this.#ofTemplate, messages, answered, asked)];
  }

  #afterCalls(
    of: TemplateFormat,
    messages: readonly Message[],
    calls: readonly ToolCall[],
    options: NextTurnOptions,
  ): number[] {
    const words = markersFor([messages, options.tools, options.templateOptions]);
    const idsOf = (made: readonly ToolCall[]): number[] => {
      const [one, other] = words.map((word) => this.#spoken(of, made, word)) as [Spoken, Spoken];
      return idsAfter(this.#tokenizer, one, other, messages, options);
    };
    try {
      return idsOf(calls);
    } catch (error) {
      // Some templates write the end of calls only where there are several.
      const [call] = calls;
      if (!(error instanceof TemplateError) || !this.isParallel || calls.length > 1 || call === undefined) throw error;
      return idsOf([{ ...call, id: newCallId() }, call]);
    }
  }

  /** A message with these calls, the last one of which has the word as its argument. */
  #spoken(of: TemplateFormat, calls: readonly ToolCall[], word: string): Spoken {
    const last = calls.at(-1);
    const message = of.message(calls.map((call) => [call.id, call.name, { z: call === last ? word : "z" }]));
    const closing = (this.format.fields === undefined ? '"}' : this.format.fields.close) + this.format.end;
    return { message, marker: word, closing: closing.replaceAll(ID, last?.id ?? "") };
  }

  // -- what the model says -----------------------------------------------------------------------------------------------

  /**
   * What a Generate is held to.
   *
   * choice: `"auto"`, text, and calls if the model makes some; `"required"`, one call at least; `"none"`, text; or the
   * name of the tool that is to be called. Throws InvalidArgument for another choice, InvalidTool for a schema that the
   * format cannot be held to.
   */
  constraint(choice = "auto", options: ToolConstraintOptions = {}): Lark {
    const { parallel = true } = known(options, "constraint");
    const named = this.tools.get(choice);
    if (named === undefined && !CHOICES.includes(choice)) {
      const names = [...this.tools.keys()].join(", ");
      throw invalid("choice", `must be auto, required, none or the name of a tool (${names}), got ${shown(choice)}`);
    }
    if (choice === "required" && this.tools.size === 0) throw invalid("choice", "is required, and there is no tool");
    const held = this.#marked.markers.markOf;
    const grammar = grammarOf(this.format, this.#marked, {
      tools: named !== undefined ? [named] : choice === "none" ? [] : [...this.tools.values()],
      maySay: choice === "auto" || choice === "none",
      isParallel: booleanOf(parallel, "parallel") && named === undefined,
      // What a server's grammar takes for no text.
      others: this.#tokenizer.addedTokens
        .filter(
          ({ id, text, isSpecial }) => !held.has(id) && id !== this.#prefix && (isSpecial || /^<[^]*>$/.test(text)),
        )
        .map(({ id }) => id),
      names: [...this.tools.keys()],
      prefix: this.#prefix,
      thinking: this.#thinking(),
    });
    return { kind: "lark", grammar };
  }

  /** What reads the tokens of one turn, as they come. */
  parser(): ToolCallParser {
    const { addedTokens } = this.#tokenizer;
    return new ToolCallParser({
      marked: this.#marked,
      tools: this.tools,
      decode: (ids) => (ids.length === 0 ? "" : this.#tokenizer.decode(ids)),
      anchor: this.#encoded("a").slice(-1),
      silent: new Set(addedTokens.filter(({ isSpecial }) => isSpecial).map(({ id }) => id)),
      shown: new Map(addedTokens.map(({ id, text }) => [id, text])),
      prefix: this.#prefix,
    });
  }

  /**
   * The parts of a turn, as its tokens come. Throws what the stream throws, and ToolCallError for a call that is cut, or
   * without a constraint written wrongly; its tokens are in the history then, and `rewind` drops them.
   */
  async *parts(stream: AsyncIterable<number> | Iterable<number>): AsyncGenerator<Part, void, undefined> {
    const parser = this.parser();
    for await (const id of stream) yield* parser.feed([id]);
    yield* parser.finish();
  }

  /** A whole turn: its text and its calls. Throws ToolCallError as `parts`. */
  read(tokenIds: Iterable<number>): ToolsTurn {
    const parser = this.parser();
    const parts = [...parser.feed(tokenIds), ...parser.finish()];
    const text = parts.map((part) => (part.kind === "text" ? part.text : "")).join("");
    return { text: text.trim(), calls: parts.filter((part) => part.kind === "call") };
  }

  // -- running -----------------------------------------------------------------------------------------------------------

  /**
   * Run the function of a call. What it throws becomes the result, with `isError`, for the model to read. Throws
   * InvalidTool for a tool that has no function.
   */
  async call(call: ToolCall): Promise<ToolResult> {
    const run = this.tools.get(call.name)?.function as ((values: unknown) => unknown) | undefined;
    if (run === undefined) {
      throw new InvalidTool(call.name, "is a tool without a function; make its result as { call, content }");
    }
    try {
      const result = (await run(call.arguments)) ?? null;
      return { call, content: typeof result === "string" ? result : JSON.stringify(result) };
    } catch (error) {
      return { call, content: String(error), isError: true };
    }
  }

  // -- the template ------------------------------------------------------------------------------------------------------

  #chatOptions(): Pick<ChatOptions, "templateOptions" | "tools"> {
    return { tools: this.#showsTools ? this.schemas : undefined, templateOptions: this.#options };
  }

  #rendered(messages: readonly Message[], addGenerationPrompt = false): string {
    const tools = this.tools.size > 0 ? { tools: this.schemas } : {};
    return render(this.#tokenizer, messages, {
      ...this.#options,
      ...tools,
      add_generation_prompt: addGenerationPrompt,
    });
  }

  #areShown(): boolean {
    const asked = this.#rendered([{ role: "user", content: "a" }]);
    return [...this.tools.keys()].every((name) => asked.includes(name));
  }

  /** Markers of reasoning, if the template knows them and the prompt has not ended it. */
  #thinking(): Thinking | undefined {
    const source = this.#tokenizer.chatTemplate ?? "";
    if (!source.includes(THINK) || !source.includes(THOUGHT)) return undefined;
    const asked: Message[] = [{ role: "user", content: "a" }];
    const plain = this.#rendered(asked);
    const whole = this.#rendered(asked, true);
    const head = whole.startsWith(plain) ? whole.slice(plain.length) : whole;
    if (head.includes(THOUGHT)) return undefined;
    const idOf = (marker: string): number | undefined =>
      this.#tokenizer.addedTokens.find(({ text }) => text === marker)?.id;
    return { begin: THINK, end: THOUGHT, beginId: idOf(THINK), endId: idOf(THOUGHT), isOpen: head.includes(THINK) };
  }

  #encoded(text: string): number[] {
    return text === "" ? [] : this.#tokenizer.encode(text);
  }
}

function unknownFormat(tokenizer: ChatTokenizer): string {
  const source = tokenizer.chatTemplate?.replace(/\s+/g, " ").trim().slice(0, 60) ?? "there is none";
  const names = Object.keys(NAMED).map((name) => `"${name}"`);
  return (
    `the chat template of the tokenizer (${source}…) writes no tool calls that can be read again; name a format for its ` +
    `model: format: ${names.join(" or ")}, or a ToolFormat of your own`
  );
}

function isResult(said: ToolResult | Message): said is ToolResult {
  return isObject((said as ToolResult).call);
}

function withSystem(messages: readonly Message[], instructions: string): Message[] {
  const [first, ...others] = messages;
  if (first?.["role"] === "system" && typeof first["content"] === "string") {
    return [{ ...first, content: `${first["content"]}\n\n${instructions}` }, ...others];
  }
  return [{ role: "system", content: instructions }, ...messages];
}

/** Results as messages: of the role that templates have for them, or together as one of the user. */
function asMessages(said: readonly (ToolResult | Message)[], of: ToolFormat): Message[] {
  const messages: Message[] = [];
  const together: string[] = [];
  for (const each of said) {
    if (!isResult(each)) messages.push(each);
    else if (of.result !== undefined) together.push(of.result.replace("{{result}}", () => each.content));
    else {
      const { id, name } = each.call;
      messages.push({ role: "tool", name, tool_call_id: id, content: each.content });
    }
  }
  return together.length > 0 ? [{ role: "user", content: together.join("\n") }, ...messages] : messages;
}

function namesOf(calls: readonly ToolCall[]): string {
  return calls.map(({ name }) => name).join(", ") || "none";
}
