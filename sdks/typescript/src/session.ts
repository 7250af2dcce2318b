/** A history on the server, with its K/V. */
import { Append, Tail, behind } from "./append.js";
import { exact, tokenIdsOf, uint64Of, type TokenIds } from "./checks.js";
import {
  HistoryLengthMismatch,
  KakeyaError,
  ProtocolError,
  SessionClosed,
  SessionNotFound,
  StateError,
} from "./errors.js";
import type { Link } from "./link.js";
import type { GenerateRequest, ReadHistoryRequest } from "./generated/kakeya/v1/runtime_pb.js";
import {
  known,
  type AppendOptions,
  type CallOptions,
  type ForkOptions,
  type GenerateOptions,
  type ThinkingOptions,
  type HistoryOptions,
  type PrefillOptions,
  type RewindOptions,
} from "./options.js";
import {
  closeRequest,
  forkRequest,
  generateRequest,
  historyRequest,
  prefillRequest,
  rewindRequest,
} from "./requests.js";
import type { Patience } from "./retry.js";
import type { Strategy } from "./strategies.js";
import { Budget, type Thought } from "./thinking.js";
import { Fold, GenerateStream } from "./stream.js";
import {
  forkedFacts,
  historyPieceOf,
  sessionInfoOf,
  type Durability,
  type GenerateResult,
  type HistoryPiece,
  type Mode,
  type SessionFacts,
  type SessionInfo,
} from "./values.js";

/**
 * A history on the server, with its K/V. `Client.createSession` makes one, `Client.session` finds it by its id; leaving the
 * block of its `await using` closes it.
 *
 * A session is one conversation: await each call before the next, except for `info()`, `close()` and a stream's
 * `cancel()`, which may come at any time.
 */
export class Session implements AsyncDisposable {
  readonly #link: Link;
  readonly #facts: SessionFacts;
  readonly #tail: Tail;
  readonly #route: string;
  #isAppending = false;
  #isClosed = false;

  private constructor(link: Link, facts: SessionFacts, route: string, isGenerating: boolean) {
    this.#link = link;
    this.#route = route;
    this.#facts = facts;
    this.#tail = new Tail(facts.historyLength);
    this.#tail.mayLag = isGenerating;
  }

  /** @internal */
  static opened(link: Link, facts: SessionFacts, route: string, isGenerating = false): Session {
    return new Session(link, facts, route, isGenerating);
  }

  /** Opaque. It, and the key if there is one, give access to the session. */
  get id(): string {
    return this.#facts.id;
  }

  /** Tokens appended and generated, as far as this object has received; `info()` asks. */
  get historyLength(): number {
    return this.#tail.length;
  }

  /** The strategy in force, with every default filled in; undefined if it is of a kind newer than this SDK. */
  get strategy(): Strategy | undefined {
    return this.#facts.strategy;
  }

  /** K/V the session holds at most between Generates. */
  get sustainedBytes(): number {
    return this.#facts.sustainedBytes;
  }

  /** Of `sustainedBytes`, those reserved when it was opened; `info()` returns them as they are now. */
  get reservedBytes(): number {
    return this.#facts.reservedBytes;
  }

  /** K/V the session holds at most ever, a running Generate included. */
  get peakBytes(): number {
    return this.#facts.peakBytes;
  }

  /** K/V the session holds at most off the device, in the server's memory. */
  get tierBytes(): number {
    return this.#facts.tierBytes;
  }

  /** Of a fork: K/V it reads where the session it was made from holds them, when it was made. */
  get sharedBytes(): number {
    return this.#facts.sharedBytes;
  }

  /**
   * Of a fork or a rewound session: how many tokens its first Generate prefills at most, if nothing is appended before.
   * It is fewer where a copy in a file has K/V of some, or another session is prefilled first that begins so. Undefined if
   * it is neither, or the server is older.
   */
  get prefillTokens(): number | undefined {
    return this.#facts.prefillTokens;
  }

  /** The longest history the session can reach; undefined if there is no limit. */
  get limitTokens(): number | undefined {
    return this.#facts.limitTokens;
  }

  /** What equal histories promise. */
  get mode(): Mode {
    return this.#facts.mode;
  }

  get modelId(): string {
    return this.#facts.modelId;
  }

  /** What the session's history survives. */
  get durability(): Durability {
    return this.#facts.durability;
  }

  get isClosed(): boolean {
    return this.#isClosed;
  }

  /**
   * Add ids to the history; returns its new length. Their prefill happens in the next `generate`.
   *
   * Takes any number of ids, in as many requests as the server's limits ask for, each sent again if its answer was lost.
   * With `expectedHistoryLength`, a history of any other length is left as it is.
   *
   * An error carries `appendedTokens`: how many of these ids are in the history, null if that cannot be known. To learn
   * it, a failed append may take 5 s more than its timeout. After one whose fate is open, also one stopped by its
   * signal, the next append expects the length known before it, and throws HistoryLengthMismatch if the ids arrived.
   */
  async append(tokenIds: TokenIds, options: AppendOptions = {}): Promise<number> {
    this.#requireOpen();
    const { expectedHistoryLength: expected } = known(options, "append");
    const append = new Append(
      this.#link,
      this.id,
      tokenIdsOf(tokenIds, "tokenIds"),
      this.#tail,
      expected === undefined ? undefined : Number(uint64Of(expected, "expectedHistoryLength")),
      this.#link.patience(options, this.#route),
    );
    this.#isAppending = true;
    try {
      return await append.run();
    } finally {
      this.#isAppending = false;
    }
  }

  /**
   * Generate from the history; what is generated becomes part of it, token by token.
   *
   * Greedy unless `temperature` is above 0. It starts at once; the stream is read by iterating it or by `result()`. A
   * signal that is aborted stops it, and reading it then throws the signal's reason.
   *
   * From a history that is shorter than the server had said nothing is generated: HistoryBehindClient. With
   * `expectedHistoryLength`, nothing is from one of any other length: HistoryLengthMismatch.
   */
  generate(maxTokens: number, options: GenerateOptions = {}): GenerateStream {
    this.#requireOpen();
    const request = generateRequest(this.id, maxTokens, options, this.#tail.length);
    return this.#started(request, options);
  }

  /**
   * Let the model think for at most `budget` tokens, end its thinking, and generate an answer of `maxTokens`.
   *
   * `endTokenIds` is what ends the thinking: if the model has not given it when the budget is used up, what is missing of
   * it is appended. The answer is a stream, as `generate` gives it. Penalties count each part by itself. A turn that ends
   * within the thinking has no answer.
   */
  async generateThinking(budget: number, maxTokens: number, options: ThinkingOptions): Promise<Thought> {
    const parts = new Budget(options);
    const thinking = await this.generate(budget, parts.thinking).result();
    const missing = parts.missing(thinking);
    if (missing !== undefined && missing.length > 0) await this.append(missing);
    const answer = missing === undefined ? undefined : this.generate(maxTokens, parts.answer(thinking));
    return Object.freeze({ thinking, appendedIds: Object.freeze(missing ?? []), answer });
  }

  /**
   * Compute the K/V of the history now, but for its last token, and generate nothing.
   *
   * The next `generate`, and forks made from now on, begin without that wait. The history stays as it is; the result's
   * `prefilledTokens` and `cachedTokens` say what was computed and what was there. What a prefill has computed when its
   * signal stops it is kept. Lengths are as for `generate`.
   */
  async prefill(options: PrefillOptions = {}): Promise<GenerateResult> {
    this.#requireOpen();
    const request = prefillRequest(this.id, options, this.#tail.length);
    return this.#started(request, options).result();
  }

  #started(request: GenerateRequest, options: PrefillOptions): GenerateStream {
    const fold = new Fold(request, options.onProgress);
    const patience = this.#link.generatePatience(options, this.#route);
    const mustMatch = options.expectedHistoryLength !== undefined;
    return GenerateStream.started(this.#link, request, patience, fold, this.#tail, mustMatch);
  }

  /**
   * A new session that goes on from where this one is, or from its first `atPosition` tokens, with a history of its own
   * from there on.
   *
   * A history that is shorter than the server had said is not forked: HistoryBehindClient. With
   * `expectedHistoryLength`, none of any other length is: HistoryLengthMismatch.
   */
  async fork(options: ForkOptions = {}): Promise<Session> {
    this.#requireOpen();
    const patience = this.#link.patience(options, this.#route);
    const reply = await this.#ofKnownLength(options, patience, (confirmed) => {
      const request = forkRequest(this.id, options, confirmed);
      return this.#link.repeat((rpc, each) => rpc.forkSession(request, each), patience);
    });
    const fork = Session.opened(this.#link, forkedFacts(reply), this.#route);
    if (options.atPosition !== undefined && fork.historyLength !== options.atPosition) {
      await fork.close();
      throw new ProtocolError(
        "the server is older than forks at a position, and forked at the end; that fork is closed",
      );
    }
    return fork;
  }

  /**
   * Close this session and return a new one in its place, whose history is this one's first `position` tokens.
   *
   * One call, whole or not at all, in this session's memory: it is not refused for lack of room. The new session has this
   * one's strategy, end ids, limit and label. Its `prefillTokens` says how many tokens at most will be
   * computed again.
   *
   * What is checked of the history's length is as for `fork`.
   */
  async rewind(position: number, options: RewindOptions = {}): Promise<Session> {
    this.#requireOpen();
    const patience = this.#link.patience(options, this.#route);
    const reply = await this.#ofKnownLength(options, patience, (confirmed) => {
      const request = rewindRequest(this.id, position, options, confirmed);
      return this.#link.repeat((rpc, each) => rpc.rewindSession(request, each), patience);
    });
    this.#isClosed = true;
    return Session.opened(this.#link, forkedFacts(reply), this.#route);
  }

  /** Call with the length that is known, or a longer one. For another length, it is another request. */
  async #ofKnownLength<Reply>(
    options: RewindOptions,
    patience: Patience,
    call: (confirmed: number) => Promise<Reply>,
  ): Promise<Reply> {
    for (;;) {
      const confirmed = this.#tail.length;
      try {
        return await call(confirmed);
      } catch (error) {
        if (!(error instanceof HistoryLengthMismatch) || patience.isAborted) throw error;
        const { actual } = error;
        if (options.expectedHistoryLength !== undefined || actual === undefined || actual === confirmed) throw error;
        if (actual < confirmed) {
          this.#tail.settle(actual);
          throw behind(confirmed, actual, error);
        }
        this.#tail.saw(actual);
      }
    }
  }

  /** Facts about the session now. Never waits for a running Generate. */
  async info(options: CallOptions = {}): Promise<SessionInfo> {
    if (this.#isClosed) throw this.#closedError();
    const sessionId = this.id;
    const patience = this.#link.patience(known(options, "this call"), this.#route);
    const info = sessionInfoOf(
      await this.#link.repeat((rpc, each) => rpc.getSessionInfo({ sessionId }, each), patience),
    );
    this.#tail.saw(info.historyLength);
    return info;
  }

  /** The history's token ids from a position to its end, in pieces. Once only. Never waits for a running Generate. */
  history(options: HistoryOptions = {}): AsyncIterableIterator<HistoryPiece> {
    if (this.#isClosed) throw this.#closedError();
    return this.#pieces(historyRequest(this.id, options), options);
  }

  async *#pieces(request: ReadHistoryRequest, options: CallOptions): AsyncGenerator<HistoryPiece, undefined> {
    for (;;) {
      const patience = this.#link.patience(options, this.#route);
      const piece = historyPieceOf(await this.#link.repeat((rpc, each) => rpc.readHistory(request, each), patience));
      this.#tail.saw(piece.historyLength);
      if (piece.tokenIds.length === 0) return;
      yield piece;
      const end = piece.firstPosition + piece.tokenIds.length;
      if (end >= piece.historyLength) return;
      request.firstPosition = BigInt(end);
    }
  }

  /** Free everything the session holds and return the final history length. Closing again does nothing more. */
  async close(options: CallOptions = {}): Promise<number> {
    if (this.#isClosed) return this.historyLength;
    const request = closeRequest(this.id);
    const patience = this.#link.patience(known(options, "this call"), this.#route);
    let wasSent = false;
    for (let attempts = 1; ; attempts++) {
      try {
        const reply = await this.#link.once((rpc, each) => rpc.closeSession(request, each), patience);
        this.#tail.settle(exact(reply.finalHistoryLength, "final_history_length"));
        break;
      } catch (error) {
        if (patience.isAborted) throw error;
        // An earlier attempt closed it, and its answer was lost.
        if (error instanceof SessionNotFound && wasSent) break;
        wasSent ||= error instanceof KakeyaError && error.wasSent;
        await this.#link.waitOrGiveUp(error, attempts, patience);
      }
    }
    this.#isClosed = true;
    return this.historyLength;
  }

  /** Closes the session. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  #requireOpen(): void {
    if (this.#isClosed) throw this.#closedError();
    if (this.#isAppending) {
      throw new StateError("an append to this session is under way; await it before the next call");
    }
  }

  #closedError(): SessionClosed {
    return new SessionClosed(
      `this session was closed with ${this.historyLength} tokens in its history; create a new one`,
    );
  }
}
