/**
 * A budget for a model's thinking: tokens until it ends by itself, or until the budget is used up and it is ended.
 *
 *     history … <think>  [thinking, at most `budget` ids]  [the marker's ids that are missing]  [the answer]
 *
 * Everything is in the history as it was generated or appended, so the next turn goes on from exactly that.
 */
import { invalid, tokenIdsOf } from "./checks.js";
import { known, type GenerateOptions, type ThinkingOptions } from "./options.js";
import type { GenerateStream } from "./stream.js";
import type { GenerateResult } from "./values.js";

/** How a thinking went, and the answer after it. */
export interface Thought {
  /** With the marker's ids at its end, as far as the model gave them. */
  readonly thinking: GenerateResult;
  /** Of the marker, put in because the budget was used up; empty: it ended by itself. */
  readonly appendedIds: readonly number[];
  /** A stream, as `generate` gives it; undefined: the turn ended before there was one. */
  readonly answer: GenerateStream | undefined;
}

/**
 * The two Generates of a thinking, by the options that are for both.
 *
 * @internal
 */
export class Budget {
  readonly thinking: GenerateOptions;
  readonly #end: number[];
  readonly #answer: GenerateOptions;

  constructor(options: ThinkingOptions) {
    const { endTokenIds, ...both } = known(options, "generateThinking");
    this.#end = tokenIdsOf(endTokenIds, "endTokenIds");
    if (this.#end.length === 0) throw invalid("endTokenIds", "must hold the ids that end the thinking, got none");
    const stopSequences = [this.#end, ...(both.stopSequences ?? [])];
    // What the answer has to be is no rule for the thinking.
    this.thinking = { ...both, stopSequences, constraint: undefined, minTokens: undefined };
    this.#answer = { ...both, expectedHistoryLength: undefined };
  }

  /** The marker's ids to append; undefined: the turn is over. */
  missing({ stopSequence, stopReason, tokenIds }: GenerateResult): number[] | undefined {
    if (stopSequence === 0) return [];
    if (stopReason !== "max_tokens") return undefined;
    let present = this.#end.length - 1;
    while (present > 0 && tokenIds.slice(-present).join() !== this.#end.slice(0, present).join()) present -= 1;
    return this.#end.slice(present);
  }

  /** Its options: with one seed, all of it is generated again the same. */
  answer({ seed }: GenerateResult): GenerateOptions {
    return { ...this.#answer, seed };
  }
}
