/** From token ids to streamed text: no incomplete characters, no part of a stop string. */

const BROKEN = "\uFFFD";
// A character has at most four bytes, and a token at least one: so many may wait for the last one.
const MAX_WAITING_IDS = 3;
// Decoding restarts after so many ids at the end of a character; after MAX_WINDOW_IDS ids, anywhere.
const WINDOW_IDS = 16;
const MAX_WINDOW_IDS = 64;

/**
 * Decodes ids one by one. The pieces joined are what decoding all ids at once gives.
 *
 * A character may be spread over several ids. Its piece waits for the last one. An incomplete character at the end is
 * left out, and so is a replacement character that the model generated there: the two look alike.
 */
export class ReplyText {
  readonly #decode: (tokenIds: readonly number[]) => string;
  #ids: number[] = [];
  /** Characters of the decoded ids that were given out. */
  #shown = 0;
  /** Ids before this one were given out; the next one's text may depend on the last of them. */
  #context = 0;

  constructor(decode: (tokenIds: readonly number[]) => string) {
    this.#decode = decode;
  }

  /** The text that this id completes. */
  push(tokenId: number): string {
    this.#ids.push(tokenId);
    const text = this.#decode(this.#ids);
    const settled = this.#settled(text);
    const piece = text.slice(this.#shown, settled);
    this.#shown = Math.max(this.#shown, settled);
    if (piece !== "" && this.#shown === text.length) {
      if (this.#ids.length >= WINDOW_IDS) {
        this.#ids.splice(0, this.#context);
        this.#shown = this.#decode(this.#ids).length;
      }
      this.#context = this.#ids.length;
    } else if (this.#ids.length >= MAX_WINDOW_IDS) {
      const waiting = text.length - this.#shown;
      this.#ids = this.#ids.slice(-WINDOW_IDS);
      this.#context = 0;
      this.#shown = this.#decode(this.#ids).length - waiting;
    }
    return piece;
  }

  /** How many characters of `text` no later id can change. */
  #settled(text: string): number {
    if (!text.endsWith(BROKEN)) return text.length;
    let before = text;
    for (let waiting = 1; waiting <= MAX_WAITING_IDS; waiting += 1) {
      before = this.#decode(this.#ids.slice(0, Math.max(0, this.#ids.length - waiting)));
      if (!before.endsWith(BROKEN)) return before.length;
    }
    // Either these bytes are not valid text, or each token begins the character that the next one ends.
    let same = 0;
    while (same < text.length && same < before.length && text[same] === before[same]) same += 1;
    return same;
  }
}

/**
 * Passes text on until it contains one of `stops`, and nothing after that.
 *
 * The result does not depend on how the text is cut into pieces: the stop string that is complete first counts, of
 * several the longest. A suffix that could begin a stop string is held back.
 */
export class StopStrings {
  readonly #stops: readonly string[];
  #waiting = "";
  /** The one that ended the text. */
  matched: string | undefined = undefined;

  constructor(stops: readonly string[]) {
    this.#stops = stops;
  }

  /** The text that can be shown now. `mayStop`: does a stop string count that is complete by now? */
  push(piece: string, mayStop = true): string {
    if (this.matched !== undefined) return "";
    const text = this.#waiting + piece;
    const [first] = this.#stops
      .map((stop) => ({ stop, start: text.indexOf(stop) }))
      .filter(({ start }) => start >= 0)
      .sort((one, other) => endOf(one) - endOf(other) || one.start - other.start);
    if (first !== undefined && mayStop) {
      this.matched = first.stop;
      this.#waiting = "";
      return text.slice(0, first.start);
    }
    const cut = text.length - Math.max(0, ...this.#stops.map((stop) => overlap(text, stop)));
    this.#waiting = text.slice(cut);
    return text.slice(0, cut);
  }

  /** The text that was held back. */
  end(): string {
    const text = this.#waiting;
    this.#waiting = "";
    return text;
  }
}

function endOf({ start, stop }: { readonly start: number; readonly stop: string }): number {
  return start + stop.length;
}

/** How many characters at the end of `text` are the beginning of `stop`. */
function overlap(text: string, stop: string): number {
  for (let count = Math.min(text.length, stop.length - 1); count > 0; count -= 1) {
    if (text.endsWith(stop.slice(0, count))) return count;
  }
  return 0;
}
