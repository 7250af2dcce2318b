/**
 * What a Generate says, as text: pieces while it comes, up to a stop string, and where in the history that was.
 *
 * A stop string is text, so it is the client's: the server sees ids, and one string has many spellings in them. The text
 * before it is given out, nothing of it is; the tokens that spell it are in the history, and `position` says how much of
 * that to keep to have the text alone there: `session.rewind(position)`.
 */
import { booleanOf, invalid, shown, textOf } from "./checks.js";
import { known, type TextOptions } from "./options.js";
import { ReplyText, StopStrings } from "./reply-text.js";
import type { GenerateStream } from "./stream.js";
import type { ChatTokenizer } from "./chat-tokens.js";
import type { GenerateResult, TokenDetail } from "./values.js";

/** What is needed of a tokenizer here. */
type Decodes = Pick<ChatTokenizer, "decode">;

/** A Generate that was read as text. */
export interface TextResult {
  /** Without the stop string. */
  readonly text: string;
  /** The stop string that ended it; undefined: none did. */
  readonly stop: string | undefined;
  /** History up to the text's last token: the first token that is not wholly before the stop string. */
  readonly position: number;
  /** All that came; those from `position` on are in the history, too. */
  readonly tokenIds: readonly number[];
  /** Undefined: a stop string ended it, so the Generate was cancelled. */
  readonly result: GenerateResult | undefined;
}

/** A Generate read as text: iterate it for pieces, or take the whole `result()`. It ends at a stop string. */
export class TextStream implements AsyncIterable<string> {
  readonly #stream: GenerateStream;
  readonly #next: () => Promise<TokenDetail | undefined>;
  readonly #take: () => void;
  readonly #reply: ReplyText;
  readonly #stops: StopStrings;
  /** A stop string that is complete within so many does not count. */
  readonly #minTokens: number;
  /** Position of the first token. */
  #first: number | undefined = undefined;
  /** Characters that are complete after each number of tokens. */
  readonly #reached = [0];
  #text = "";
  #isOver = false;

  private constructor(
    stream: GenerateStream,
    next: () => Promise<TokenDetail | undefined>,
    take: () => void,
    tokenizer: Decodes,
    options: TextOptions,
    minTokens: number,
  ) {
    const { stop = [], skipSpecialTokens = true } = known(options, "text");
    if (!Array.isArray(stop)) throw invalid("stop", `must be a list of texts, got ${shown(stop)}`);
    const stops = stop.map((one, at) => textOf(one as string, `stop[${at}]`));
    if (stops.includes("")) throw invalid("stop", `must not hold an empty text, got ${shown(stops)}`);
    const decoding = { skipSpecialTokens: booleanOf(skipSpecialTokens, "skipSpecialTokens") };
    this.#stream = stream;
    this.#next = next;
    this.#take = take;
    this.#reply = new ReplyText((ids) => tokenizer.decode(ids, decoding));
    this.#stops = new StopStrings(stops);
    this.#minTokens = minTokens;
  }

  /** @internal */
  static over(
    stream: GenerateStream,
    next: () => Promise<TokenDetail | undefined>,
    take: () => void,
    tokenizer: Decodes,
    options: TextOptions,
    minTokens: number,
  ): TextStream {
    return new TextStream(stream, next, take, tokenizer, options, minTokens);
  }

  /** The pieces of text, as they come. Once only. */
  [Symbol.asyncIterator](): AsyncIterableIterator<string> {
    this.#take();
    const iterator: AsyncIterableIterator<string> = {
      next: async () => {
        for (;;) {
          const piece = await this.#piece();
          if (piece === undefined) return { done: true, value: undefined };
          if (piece !== "") return { done: false, value: piece };
        }
      },
      return: () => {
        this.cancel();
        return Promise.resolve({ done: true, value: undefined });
      },
      [Symbol.asyncIterator]: () => iterator,
    };
    return iterator;
  }

  /** Read to the end and return everything. Throws the stream's error; StateError if it was cancelled. */
  async result(): Promise<TextResult> {
    while ((await this.#piece()) !== undefined);
    const stop = this.#stops.matched;
    const result = stop === undefined ? await this.#stream.result() : undefined;
    return Object.freeze({
      text: this.#text,
      stop,
      position: result?.historyLength ?? this.#positionOfStop(),
      tokenIds: Object.freeze([...this.#stream.tokenIds]),
      result,
    });
  }

  /** Stop generating: at once, not awaited. Nothing happens after the end. */
  cancel(): void {
    this.#stream.cancel();
  }

  #positionOfStop(): number {
    // A token within a character adds nothing to what is complete, and is not wholly before what comes.
    const whole = Math.max(...this.#reached.filter((reached) => reached <= this.#text.length));
    return (this.#first ?? 0) + this.#reached.indexOf(whole);
  }

  /** The text of the next token, perhaps none; undefined at the end. */
  async #piece(): Promise<string | undefined> {
    if (this.#isOver) return undefined;
    const token = await this.#next();
    let piece: string;
    if (token === undefined) {
      piece = this.#stops.end();
      this.#isOver = true;
    } else {
      this.#first ??= token.position;
      const complete = this.#reply.push(token.tokenId);
      this.#reached.push((this.#reached.at(-1) ?? 0) + complete.length);
      piece = this.#stops.push(complete, this.#reached.length > this.#minTokens + 1);
      if (this.#stops.matched !== undefined) {
        this.#isOver = true;
        this.cancel();
      }
    }
    this.#text += piece;
    return piece;
  }
}
