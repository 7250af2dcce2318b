/**
 * Appends token ids exactly once, or throws an error if that cannot be confirmed.
 *
 * Every request has an id by which the server knows it when it comes again, and names the length it appends to: history
 * only grows, so it can take effect at one length alone. Sending it again is safe. Where no answer comes in the end, the
 * history's length is asked for:
 *
 *     found == length     it did not arrive
 *     longer              sent once more: answered as it was if it arrived, else refused, for it names another length
 *
 * All other cases (no answer at all, or a server without request ids) throw AppendUnresolved.
 */
import {
  AppendUnresolved,
  CallerError,
  DeadlineExceeded,
  HistoryBehindClient,
  HistoryLengthMismatch,
  JournalAway,
  KakeyaError,
  ProtocolError,
  ServerError,
  SessionElsewhere,
  StateError,
  TransportError,
} from "./errors.js";
import { exact } from "./checks.js";
import type { AppendTokensResponse } from "./generated/kakeya/v1/runtime_pb.js";
import type { Link } from "./link.js";
import { appendRequest } from "./requests.js";
import type { Patience } from "./retry.js";

// A failed append asks for the length even when its own time is up; that question may take this long.
const INQUIRY_SECONDS = 5;
// The largest append request: session id, request id, lengths and field tags, then ids of at most five bytes each.
const ENVELOPE_BYTES = 256;
const BYTES_PER_ID = 5;

/** The end of a session's history, as far as the server has reported it to this client. It can lag, but never leads. */
export class Tail {
  /** A Generate ran and its last frame was not received. */
  mayLag = false;
  /** A request may yet arrive, so the next append insists on `length`. */
  hasOpenAppend = false;
  #length: number;

  constructor(length: number) {
    this.#length = length;
  }

  get length(): number {
    return this.#length;
  }

  saw(length: number): void {
    this.#length = Math.max(this.#length, length);
  }

  /** The server said `length` with nothing of ours under way. */
  settle(length: number): void {
    this.#length = length;
    this.mayLag = this.hasOpenAppend = false;
  }
}

/**
 * One append, in as many requests as the server's limits ask for. `run` is called once.
 *
 * If the history is longer than `tail` knew and the caller named no length, the ids go to its end all the same. One that
 * is shorter has lost tokens: that is an error, and nothing is appended.
 */
export class Append {
  readonly #link: Link;
  readonly #sessionId: string;
  readonly #ids: number[];
  readonly #tail: Tail;
  readonly #patience: Patience;
  #length: number;
  /** An earlier append's request may yet arrive. */
  #isOpen: boolean;
  #mustMatch: boolean;
  /** Only then does a history longer by this append's ids prove that they arrived. */
  #isExact: boolean;
  /** Of the last request. */
  #isFateKnown = true;

  constructor(
    link: Link,
    sessionId: string,
    ids: number[],
    tail: Tail,
    expectedLength: number | undefined,
    patience: Patience,
  ) {
    this.#link = link;
    this.#sessionId = sessionId;
    this.#ids = ids;
    this.#tail = tail;
    this.#patience = patience;
    this.#length = expectedLength ?? tail.length;
    this.#isOpen = tail.hasOpenAppend;
    this.#mustMatch = expectedLength !== undefined || this.#isOpen;
    this.#isExact = this.#length === tail.length && !tail.mayLag && !this.#isOpen;
  }

  /** The new history length. The SDK's errors carry `appendedTokens`; AppendUnresolved: the outcome is unknown. */
  async run(): Promise<number> {
    let appended = 0;
    try {
      const size = await this.#idsPerRequest();
      // No ids at all is still one request: it refreshes the idle clock.
      for (let start = 0; start < Math.max(this.#ids.length, 1); start += size) {
        const chunk = this.#ids.slice(start, start + size);
        await this.#send(chunk);
        appended += chunk.length;
        this.#mustMatch = this.#isExact = true;
        this.#isOpen = false;
      }
    } catch (error) {
      // The signal's reason is not ours to write on: it may be an error of another session's.
      if (error instanceof KakeyaError && !this.#patience.isReason(error)) {
        error.appendedTokens = this.#isFateKnown ? appended : null;
      }
      throw error;
    }
    return this.#length;
  }

  /** Append one request's worth at `#length`, and move `#length` behind it. */
  async #send(chunk: number[]): Promise<void> {
    let request = appendRequest(this.#sessionId, chunk, this.#length);
    // An earlier attempt may have arrived, or may yet.
    let isInDoubt = false;
    // With this; what follows only asks.
    let givenUp: KakeyaError | undefined;
    let patience = this.#patience;
    for (let attempts = 1; ; attempts++) {
      const end = this.#length + chunk.length;
      // Written before the request leaves, for the case that the caller's signal ends the wait for its answer.
      this.#tail.hasOpenAppend = true;
      try {
        const reply = await this.#link.once((rpc, options) => rpc.appendTokens(request, options), patience);
        const length = exact(reply.historyLength, "history_length");
        if (length === end) {
          this.#moveTo(end);
          return;
        }
        this.#isFateKnown = false;
        throw new ProtocolError(
          `after an append at ${this.#length} the history should have ${end} tokens, the server says ${length}`,
        );
      } catch (error) {
        if (patience.isAborted) {
          // Whatever its reason is, it is no answer to this request, which may have arrived.
          this.#isFateKnown = false;
          throw error;
        }
        if (!(error instanceof KakeyaError) || error instanceof ProtocolError) throw error;
        if (error instanceof HistoryLengthMismatch) {
          if (error.actual === undefined) {
            this.#isFateKnown = !isInDoubt;
            throw error;
          }
          const confirmed = this.#tail.length;
          this.#tail.settle(error.actual);
          if (isInDoubt && !(await this.#serverKnowsIds())) {
            // Only its length shows it.
            if (this.#isExact && error.actual === end) {
              this.#moveTo(end);
              return;
            }
            throw this.#unresolved(givenUp ?? error, chunk);
          }
          // It did not arrive: its id would have been known. Nor can it any more, for history only grows.
          if (givenUp !== undefined) throw givenUp;
          if (this.#mustMatch) throw error;
          // To append here would leave out what the caller believes to be there.
          if (error.actual < confirmed) throw behind(confirmed, error.actual, error);
          this.#length = error.actual;
          this.#isExact = true;
          this.#isOpen = isInDoubt = false;
          // For another length, it is another request.
          request = appendRequest(this.#sessionId, chunk, this.#length);
          continue;
        }
        // Anything else is a refusal, which changed nothing unless it says otherwise.
        isInDoubt ||= isFateOpen(error);
        this.#tail.hasOpenAppend = this.#isOpen || isInDoubt;
        const seconds = patience.waitSeconds(attempts, error);
        if (seconds !== undefined) {
          // For the case that the client is closed meanwhile.
          this.#isFateKnown = !isInDoubt;
          await this.#link.wait(seconds, patience);
          this.#isFateKnown = true;
          continue;
        }
        const failure = givenUp ?? patience.verdict(error);
        if (!isInDoubt || !(failure instanceof KakeyaError)) throw failure;
        const found = await this.#inquire();
        if (found === this.#length) throw failure;
        if (found === undefined || givenUp !== undefined) {
          if (this.#isExact && found === end) {
            this.#moveTo(end);
            return;
          }
          throw this.#unresolved(failure, chunk);
        }
        // It arrived, or something else made the history longer: the request's id shows which. To send it once more is
        // to ask: if it did not arrive, there is no length any more at which it could.
        givenUp = failure;
        patience = this.#patience.extended(INQUIRY_SECONDS);
        attempts = 0;
      }
    }
  }

  /** The error for `cause` if it is unknown whether the ids arrived. */
  #unresolved(cause: KakeyaError, chunk: number[]): KakeyaError {
    this.#isFateKnown = false;
    // Such as a session that is gone, with all that was in it.
    if (cause instanceof CallerError && !(cause instanceof HistoryLengthMismatch)) return cause;
    return new AppendUnresolved(cause, { historyLength: this.#length, pendingTokens: chunk.length });
  }

  /** Does the server know a request again? Found out once, with an append of nothing that is sent twice. */
  async #serverKnowsIds(): Promise<boolean> {
    if (this.#link.knowsIds === undefined) {
      const request = appendRequest(this.#sessionId, []);
      const patience = this.#patience.extended(INQUIRY_SECONDS);
      const send = (): Promise<AppendTokensResponse> =>
        this.#link.repeat((rpc, options) => rpc.appendTokens(request, options), patience);
      try {
        await send();
        this.#link.knowsIds = (await send()).replayed;
      } catch (error) {
        if (error instanceof KakeyaError) return false;
        throw error;
      }
    }
    return this.#link.knowsIds;
  }

  #moveTo(end: number): void {
    this.#length = end;
    this.#tail.settle(end);
  }

  /** The history length now; undefined if that, too, fails. */
  async #inquire(): Promise<number | undefined> {
    try {
      const patience = this.#patience.extended(INQUIRY_SECONDS);
      const sessionId = this.#sessionId;
      const reply = await this.#link.repeat((rpc, options) => rpc.getSessionInfo({ sessionId }, options), patience);
      return exact(reply.historyLength, "history_length");
    } catch (error) {
      if (error instanceof KakeyaError) return undefined;
      throw error;
    }
  }

  async #idsPerRequest(): Promise<number> {
    if (this.#link.appendLimitTokens === undefined) {
      const limits = await this.#link.repeat((rpc, options) => rpc.getServerInfo({}, options), this.#patience);
      const bySize = Math.floor((limits.maxMessageBytes - ENVELOPE_BYTES) / BYTES_PER_ID);
      this.#link.appendLimitTokens = Math.max(1, Math.min(limits.maxAppendTokens, bySize));
    }
    return this.#link.appendLimitTokens;
  }
}

/** After these the client does not know whether the request took effect. */
function isFateOpen(error: KakeyaError): boolean {
  if (error instanceof JournalAway || error instanceof SessionElsewhere) return error.isPending;
  const kinds = [TransportError, DeadlineExceeded, ServerError, StateError];
  return error.wasSent && kinds.some((kind) => error instanceof kind);
}

/** The error of a call that was refused with `cause`, for the history is shorter than the server had said. */
export function behind(confirmed: number, actual: number, cause: HistoryLengthMismatch): HistoryBehindClient {
  return new HistoryBehindClient(
    `the server had said that the history has ${confirmed} tokens, and now it has ${actual}: it has lost some. ` +
      "Nothing was changed; append what is missing, or go on from where the history ends",
    {
      code: "DATA_LOSS",
      reason: "HISTORY_BEHIND_CLIENT",
      metadata: { expected: String(confirmed), actual: String(actual) },
      cause,
    },
  );
}
