/** Ids to text as they come, never with half a character: some take several ids. */
import type { ChatTokenizer } from "@kakeya/runtime/tokenization";

const UNFINISHED = "\u{fffd}";

export class TextStream {
  readonly #tokenizer: ChatTokenizer;
  /** The ids of the last piece, whose text what follows may lean on, then those whose text is not out yet. */
  #ids: number[] = [];
  #emitted = 0;

  constructor(tokenizer: ChatTokenizer) {
    this.#tokenizer = tokenizer;
  }

  /** The text that is certain now. */
  push(tokenId: number): string {
    this.#ids.push(tokenId);
    const before = this.#decode(this.#ids.slice(0, this.#emitted));
    const text = this.#decode(this.#ids);
    if (text.endsWith(UNFINISHED) || text.length <= before.length) return "";
    this.#ids = this.#ids.slice(this.#emitted);
    this.#emitted = this.#ids.length;
    return text.slice(before.length);
  }

  #decode(ids: readonly number[]): string {
    return this.#tokenizer.decode(ids, { skipSpecialTokens: true });
  }
}
