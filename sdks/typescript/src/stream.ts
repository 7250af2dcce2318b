/** A Generate under way: frames in, tokens out, and at the end the result. */
import { create } from "@bufbuild/protobuf";

import { exact } from "./checks.js";
import { behind, type Tail } from "./append.js";
import { HistoryLengthMismatch, ProtocolError, StateError } from "./errors.js";
import {
  GenerateRequestSchema,
  type GenerateDone,
  type GenerateRequest,
  type GenerateResponse,
  type TokenDetail as WireToken,
} from "./generated/kakeya/v1/runtime_pb.js";
import type { Leash, Link } from "./link.js";
import { newRequestId } from "./requests.js";
import type { TextOptions } from "./options.js";
import type { Patience } from "./retry.js";
import { TextStream } from "./text.js";
import type { ChatTokenizer } from "./chat-tokens.js";
import { stopReasonOf, type GenerateResult, type Progress, type TokenDetail, type TopLogprob } from "./values.js";

type OnProgress = ((progress: Progress) => void) | undefined;

/**
 * Folds frames into tokens and a result.
 *
 * @internal
 */
export class Fold {
  readonly tokenIds: number[] = [];
  readonly minTokens: number;
  result: GenerateResult | undefined = undefined;
  readonly #logprobs: number[] | undefined;
  readonly #tops: (readonly TopLogprob[])[] = [];
  readonly #wantedTops: number;
  readonly #onProgress: OnProgress;
  #nextPosition: number | undefined = undefined;
  #queuePosition = 0;
  /** A heartbeat has nothing newer. */
  #reported = { done: 0n, total: 0n };
  #truncatedTokens = 0;

  constructor(request: GenerateRequest, onProgress: OnProgress) {
    this.#logprobs = request.logprobs === true ? [] : undefined;
    this.#wantedTops = request.topLogprobs;
    this.minTokens = request.minTokens;
    this.#onProgress = onProgress;
  }

  /** Absolute position of the token that comes next; undefined before the first. */
  get nextPosition(): number | undefined {
    return this.#nextPosition;
  }

  /** The token of this frame, if it is one. Throws ProtocolError for a frame that cannot come here. */
  feed({ payload }: GenerateResponse): TokenDetail | undefined {
    if (this.result !== undefined) throw new ProtocolError("the server sent a frame after the last one");
    switch (payload.case) {
      case "token":
        return this.#token(payload.value);
      case "done":
        this.result = this.#finish(payload.value);
        return undefined;
      case "truncated":
        this.#truncatedTokens = exact(payload.value.droppedTokenCount, "dropped_token_count");
        return undefined;
      case "accepted":
        this.#queuePosition = payload.value.queuePosition;
        this.#report(0n, payload.value.prefillTokenCount);
        return undefined;
      case "progress": {
        const { doneTokenCount: done, totalTokenCount: total } = payload.value;
        if (done !== this.#reported.done || total !== this.#reported.total) this.#report(done, total);
        return undefined;
      }
      case "tokenId":
        throw new ProtocolError("the server sent a bare token id where a detailed one was asked for");
      case undefined: // a frame newer than this SDK, which it did not ask for
        return undefined;
    }
  }

  #token(token: WireToken): TokenDetail {
    const position = exact(token.position, "position");
    if (this.#nextPosition !== undefined && position !== this.#nextPosition) {
      throw new ProtocolError(`the server sent position ${position} where ${this.#nextPosition} comes next`);
    }
    if (this.#logprobs !== undefined) {
      if (token.logprob === undefined) throw new ProtocolError(`the server sent no logprob for position ${position}`);
      this.#logprobs.push(token.logprob);
    }
    const topLogprobs = token.topTokenIds.map((tokenId, at) => ({
      tokenId,
      logprob: token.topLogprobs[at] ?? Number.NaN,
    }));
    if (topLogprobs.length !== this.#wantedTops || token.topLogprobs.length !== this.#wantedTops) {
      throw new ProtocolError(
        `the server sent ${topLogprobs.length} topLogprobs for position ${position}, ${this.#wantedTops} were asked for`,
      );
    }
    this.#tops.push(Object.freeze(topLogprobs));
    this.#nextPosition = position + 1;
    this.tokenIds.push(token.tokenId);
    return { tokenId: token.tokenId, position, logprob: token.logprob, topLogprobs };
  }

  #report(done: bigint, total: bigint): void {
    this.#reported = { done, total };
    this.#onProgress?.({
      queuePosition: this.#queuePosition,
      doneTokens: exact(done, "done_token_count"),
      totalTokens: exact(total, "total_token_count"),
    });
  }

  #finish(done: GenerateDone): GenerateResult {
    if (done.generatedTokenCount !== this.tokenIds.length) {
      throw new ProtocolError(
        `the server counts ${done.generatedTokenCount} generated tokens, ${this.tokenIds.length} were received`,
      );
    }
    return Object.freeze({
      tokenIds: Object.freeze([...this.tokenIds]),
      logprobs: this.#logprobs === undefined ? undefined : Object.freeze([...this.#logprobs]),
      topLogprobs: this.#wantedTops === 0 ? undefined : Object.freeze([...this.#tops]),
      stopReason: stopReasonOf(done.stopReason),
      historyLength: exact(done.historyLength, "history_length"),
      seed: done.seed,
      prefillSeconds: done.prefillDurationSeconds,
      totalSeconds: done.totalDurationSeconds,
      generatedTokens: done.generatedTokenCount,
      prefilledTokens: exact(done.prefilledTokenCount, "prefilled_token_count"),
      cachedTokens: exact(done.cachedTokenCount, "cached_token_count"),
      attendedPositions: exact(done.attendedPositionCount, "attended_position_count"),
      evictedPositions: exact(done.evictedPositionCount, "evicted_position_count"),
      restoredPositions: exact(done.restoredPositionCount, "restored_position_count"),
      truncatedTokens: this.#truncatedTokens,
      draftedTokens: exact(done.draftedTokenCount, "drafted_token_count"),
      acceptedTokens: exact(done.acceptedTokenCount, "accepted_token_count"),
      isDegraded: done.degraded,
      fitsConstraint: done.fitsConstraint,
      stopSequence: done.stopSequence,
    });
  }
}

/**
 * The calls behind one stream: the first, and after a lost connection another that goes on where that one stopped.
 *
 * It begins at once, and knows nothing of the stream that reads it, so that a stream without references can be
 * collected.
 *
 * The request names the length of the history that this client knows. If the history is longer and the caller named no
 * length, the Generate begins at its end all the same. One that is shorter has lost tokens: that is an error, and nothing
 * is generated.
 */
class Attachment {
  readonly #link: Link;
  readonly #patience: Patience;
  readonly #tail: Tail;
  /** The caller named the length. */
  readonly #mustMatch: boolean;
  readonly #leash: Leash;
  #request: GenerateRequest;
  #frames: AsyncIterator<GenerateResponse>;
  #first: Promise<IteratorResult<GenerateResponse>> | undefined;
  #attempts = 1;

  constructor(link: Link, request: GenerateRequest, patience: Patience, tail: Tail, mustMatch: boolean) {
    this.#link = link;
    this.#request = request;
    this.#patience = patience;
    this.#tail = tail;
    this.#mustMatch = mustMatch;
    this.#leash = link.leash(patience.signal);
    [this.#frames, this.#first] = this.#open(request);
  }

  /**
   * The next frame, undefined at the end. `position` is that of the next token, for a call that has to go on there.
   *
   * A connection that breaks is made again, but for a stream that is complete: that has nothing left to lose.
   */
  async next(position: number | undefined, isComplete: boolean): Promise<GenerateResponse | undefined> {
    for (;;) {
      try {
        const frame = await (this.#first ?? this.#frames.next());
        this.#first = undefined;
        if (frame.done === true) return undefined;
        // Only tokens count as getting on: a server reports progress to each attempt.
        if (frame.value.payload.case === "token") {
          this.#attempts = 1;
          this.#patience.answered();
        }
        return frame.value;
      } catch (error) {
        this.#first = undefined;
        if (isComplete) return undefined;
        const explained = this.#link.explain(error, this.#patience);
        if (explained instanceof HistoryLengthMismatch && this.#hasMoved(explained)) {
          this.#leash.signal.throwIfAborted();
          [this.#frames, this.#first] = this.#open(this.#request);
          continue;
        }
        const seconds = this.#patience.waitSeconds(this.#attempts, explained);
        if (seconds === undefined || this.#leash.signal.aborted) throw this.#patience.verdict(explained);
        await this.#link.waitOn(this.#leash, seconds, this.#patience);
        this.#attempts += 1;
        [this.#frames, this.#first] = this.#open(
          position === undefined
            ? this.#request
            : create(GenerateRequestSchema, { ...this.#request, resumeFrom: BigInt(position) }),
        );
      }
    }
  }

  /**
   * Was nothing generated only because the history is longer than this client knew? Then the request names its length
   * now. Throws HistoryBehindClient if it is shorter.
   */
  #hasMoved(mismatch: HistoryLengthMismatch): boolean {
    const { expected, actual } = mismatch;
    // One that had begun already, and has been stopped, names the place where it would go on.
    if (this.#mustMatch || expected === undefined || actual === undefined) return false;
    if (expected !== Number(this.#request.expectedHistoryLength)) return false;
    if (actual < expected) {
      this.#tail.settle(actual);
      throw behind(expected, actual, mismatch);
    }
    this.#tail.saw(actual);
    // For another length, it is another request.
    const changed = { expectedHistoryLength: BigInt(actual), requestId: newRequestId() };
    this.#request = create(GenerateRequestSchema, { ...this.#request, ...changed });
    return true;
  }

  cancel(): void {
    this.#leash.cancel();
    this.#leash.release();
    void readOut(this.#frames);
  }

  release(): void {
    this.#leash.release();
  }

  #open(request: GenerateRequest): [AsyncIterator<GenerateResponse>, Promise<IteratorResult<GenerateResponse>>] {
    const options = { signal: this.#leash.signal, ...this.#patience.rpcOptions };
    const frames = this.#link.rpc.generate(request, options)[Symbol.asyncIterator]();
    const first = frames.next();
    // It fails where it is read; until it is read, its failure is not an unhandled rejection.
    first.catch(() => undefined);
    return [frames, first];
  }
}

/** What is left of a call that was cancelled. Only one that is read to its end takes its deadline's timer away. */
async function readOut(frames: AsyncIterator<unknown>): Promise<void> {
  try {
    while ((await frames.next()).done !== true);
  } catch {
    // That it was cancelled is known.
  }
}

// A stream that is dropped stops the generation, as leaving its loop does.
const dropped = new FinalizationRegistry<Attachment>((attachment) => {
  attachment.cancel();
});

/**
 * A Generate under way: iterate it for token ids, or `details()`, or take the whole `result()`.
 *
 * Leaving the loop early, leaving the block of its `await using`, `cancel()` and dropping it stop the generation. The
 * session and everything received stay. A lost connection is made again, and the stream goes on where it stopped.
 */
export class GenerateStream implements AsyncIterable<number>, AsyncDisposable {
  readonly #attachment: Attachment;
  readonly #fold: Fold;
  readonly #tail: Tail;
  #turn: Promise<unknown> = Promise.resolve();
  #isTaken = false;
  #isOver = false;
  #isCancelled = false;
  #failure: { readonly error: unknown } | undefined = undefined;

  private constructor(attachment: Attachment, fold: Fold, tail: Tail) {
    this.#attachment = attachment;
    this.#fold = fold;
    this.#tail = tail;
    tail.mayLag = true;
    dropped.register(this, attachment, this);
  }

  /** @internal */
  static started(
    link: Link,
    request: GenerateRequest,
    patience: Patience,
    fold: Fold,
    tail: Tail,
    mustMatch: boolean,
  ): GenerateStream {
    return new GenerateStream(new Attachment(link, request, patience, tail, mustMatch), fold, tail);
  }

  /** The tokens received so far. All of them are in the session's history, whatever happens to the stream. */
  get tokenIds(): readonly number[] {
    return [...this.#fold.tokenIds];
  }

  /** The server has said its last word; `result()` returns at once. */
  get isFinished(): boolean {
    return this.#isOver && this.#fold.result !== undefined;
  }

  /** The token ids, as they come. Once only. */
  [Symbol.asyncIterator](): AsyncIterableIterator<number> {
    return this.#tokens((token) => token.tokenId);
  }

  /** The tokens with position and, if asked for, logprob, as they come. Once only, in place of iterating. */
  details(): AsyncIterableIterator<TokenDetail> {
    return this.#tokens((token) => token);
  }

  /**
   * The tokens as text: pieces of whole characters, in place of iterating, up to the first of the texts `stop`.
   *
   * The stop string is not given out, and what may be its beginning waits. It ends the generation; the result says which
   * it was, and where to `rewind` to, to have the text without it in the history.
   */
  text(tokenizer: Pick<ChatTokenizer, "decode">, options: TextOptions = {}): TextStream {
    return TextStream.over(
      this,
      () => this.#next(),
      () => {
        this.#take();
      },
      tokenizer,
      options,
      this.#fold.minTokens,
    );
  }

  /** Read to the end and return everything. Throws the stream's error; StateError if it was cancelled. */
  async result(): Promise<GenerateResult> {
    while ((await this.#next()) !== undefined);
    if (this.#fold.result !== undefined) return this.#fold.result;
    if (this.#failure !== undefined) throw this.#failure.error;
    throw new StateError(
      `the stream was cancelled after ${this.#fold.tokenIds.length} tokens, so it has no result; ` +
        "tokenIds has what was received, session.info() what the history holds",
    );
  }

  /** Stop generating: at once, not awaited. Nothing happens after the end. */
  cancel(): void {
    if (this.#isOver) return;
    this.#isOver = this.#isCancelled = true;
    this.#attachment.cancel();
    dropped.unregister(this);
  }

  /** The same as `cancel`. */
  [Symbol.asyncDispose](): Promise<void> {
    this.cancel();
    return Promise.resolve();
  }

  /** Hand the tokens to one reader. */
  #take(): void {
    if (this.#isTaken) {
      throw new StateError("this stream is or was iterated already; its tokens are in tokenIds and in result()");
    }
    if (this.#isOver) throw new StateError("this stream has nothing left to iterate; its tokens are in tokenIds");
    this.#isTaken = true;
  }

  #tokens<T>(pick: (token: TokenDetail) => T): AsyncIterableIterator<T> {
    this.#take();
    const iterator: AsyncIterableIterator<T> = {
      next: async () => {
        const token = await this.#next();
        return token === undefined ? { done: true, value: undefined } : { done: false, value: pick(token) };
      },
      return: () => {
        this.cancel();
        return Promise.resolve({ done: true, value: undefined });
      },
      [Symbol.asyncIterator]: () => iterator,
    };
    return iterator;
  }

  /** The next token, undefined at the end. Readers that do not wait for one another come one after the other. */
  #next(): Promise<TokenDetail | undefined> {
    const token = this.#turn.then(() => this.#read());
    this.#turn = token.catch(() => undefined);
    return token;
  }

  /** Whatever goes wrong here ends the call. */
  async #read(): Promise<TokenDetail | undefined> {
    try {
      while (!this.#isOver) {
        const frame = await this.#attachment.next(this.#fold.nextPosition, this.#fold.result !== undefined);
        if (this.#hasEnded()) return undefined;
        if (frame === undefined) {
          if (this.#fold.result === undefined) throw new ProtocolError("the stream ended without its last frame");
          this.#end();
          return undefined;
        }
        const token = this.#fed(frame);
        if (token !== undefined) {
          this.#tail.saw(token.position + 1);
          return token;
        }
        if (this.#fold.result !== undefined) this.#tail.settle(this.#fold.result.historyLength);
      }
      return undefined;
    } catch (error) {
      // A stream we cancelled ends quietly, but not where the callback for its progress has failed.
      if (this.#isCancelled) {
        if (this.#failure === undefined) return undefined;
        throw error;
      }
      this.#end();
      this.#attachment.cancel();
      this.#failure = { error };
      throw error;
    }
  }

  /** The token of this frame, if it is one. What goes wrong with it is what became of the stream. */
  #fed(frame: GenerateResponse): TokenDetail | undefined {
    try {
      return this.#fold.feed(frame);
    } catch (error) {
      this.#failure = { error };
      throw error;
    }
  }

  /** Did `cancel()` come while a frame was awaited? */
  #hasEnded(): boolean {
    return this.#isOver;
  }

  #end(): void {
    this.#isOver = true;
    this.#attachment.release();
    dropped.unregister(this);
  }
}
