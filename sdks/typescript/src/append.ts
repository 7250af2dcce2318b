/**
 * Appending token ids so that each is in the history once, or the caller knows how many are.
 *
 * Every request has an id by which the server knows it when it comes again, and names the length it appends to: history
 * only grows, so it can take effect at one length alone. Sending it again is safe. Where no answer comes in the end, the
 * length tells what happened:
 *
 *     found == length             it did not arrive
 *     found == length + count     it arrived
 *     anything else               somebody else wrote, too: nobody can tell
 */
import {
  DeadlineExceeded,
  HistoryLengthMismatch,
  KakeyaError,
  ProtocolError,
  ServerError,
  TransportError,
} from "./errors.js";
import { exact } from "./checks.js";
import type { Link } from "./link.js";
import { appendRequest } from "./requests.js";
import type { Patience } from "./retry.js";

// A failed append asks for the length even when its own time is up; that question may take this long.
const INQUIRY_SECONDS = 5;
// The largest append request: session id, request id, lengths and field tags, then ids of at most five bytes each.
const ENVELOPE_BYTES = 256;
const BYTES_PER_ID = 5;

/** The end of a session's history, as far as this client was told. It can lag, but never leads. */
export class Tail {
  /** A Generate ran and its last word was not heard. */
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
 * If the history is longer than `tail` knew and the caller named no length, the ids go to its end all the same.
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

  /** The new history length. Errors of ours carry `appendedTokens`. */
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
      if (error instanceof KakeyaError) error.appendedTokens = this.#isFateKnown ? appended : null;
      throw error;
    }
    return this.#length;
  }

  /** Append one request's worth at `#length`, and move `#length` behind it. */
  async #send(chunk: number[]): Promise<void> {
    let request = appendRequest(this.#sessionId, chunk, this.#length);
    // An earlier attempt may have arrived, or may yet.
    let isInDoubt = false;
    for (let attempts = 1; ; attempts++) {
      const end = this.#length + chunk.length;
      // Written before the request leaves, for the case that the caller's signal ends the wait for its answer.
      this.#tail.hasOpenAppend = true;
      this.#isFateKnown = false;
      try {
        const reply = await this.#link.once((rpc, options) => rpc.appendTokens(request, options), this.#patience);
        const length = exact(reply.historyLength, "history_length");
        if (length !== end) {
          throw new ProtocolError(
            `after an append at ${this.#length} the history should have ${end} tokens, the server says ${length}`,
          );
        }
        this.#moveTo(end);
        return;
      } catch (error) {
        if (!(error instanceof KakeyaError)) throw error;
        if (error instanceof HistoryLengthMismatch && error.actual !== undefined) {
          this.#tail.settle(error.actual);
          // It arrived, at a server that knows no ids.
          if (isInDoubt && this.#isExact && error.actual === end) {
            this.#moveTo(end);
            return;
          }
          this.#isFateKnown = !isInDoubt;
          if (this.#mustMatch || isInDoubt) throw error;
          this.#length = error.actual;
          this.#isExact = true;
          this.#isOpen = false;
          // For another length, it is another request.
          request = appendRequest(this.#sessionId, chunk, this.#length);
          continue;
        }
        if (isFateOpen(error)) {
          isInDoubt = true;
        } else {
          // Refused: this attempt changed nothing.
          this.#tail.hasOpenAppend = this.#isOpen || isInDoubt;
          this.#isFateKnown = !isInDoubt;
        }
        const seconds = this.#patience.waitSeconds(attempts, error);
        if (seconds !== undefined) {
          await this.#link.wait(seconds, this.#patience);
          continue;
        }
        if (isInDoubt) {
          const found = await this.#inquire();
          if (this.#isExact && found === end && end !== this.#length) {
            this.#moveTo(end);
            return;
          }
          this.#isFateKnown = found === this.#length;
        }
        throw error;
      }
    }
  }

  #moveTo(end: number): void {
    this.#length = end;
    this.#isFateKnown = true;
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

/** After these nobody on this side knows whether the request took effect. */
function isFateOpen(error: KakeyaError): boolean {
  return error instanceof TransportError || error instanceof DeadlineExceeded || error instanceof ServerError;
}
