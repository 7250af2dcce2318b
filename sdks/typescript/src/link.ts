/** One client's connection and settings, shared by its sessions, and how their calls are carried out. */
import { setTimeout as sleep } from "node:timers/promises";

import { ConnectError, type CallOptions as RpcOptions } from "@connectrpc/connect";

import { openChannel, type Channel, type Rpc } from "./channel.js";
import { secondsOf } from "./checks.js";
import { ConnectionFailed, KakeyaError, StateError, TLSFailed } from "./errors.js";
import type { CallOptions, ClientOptions } from "./options.js";
import { tlsMismatch } from "./probe.js";
import { Patience, retryPolicyOf, type Contact, type FullPolicy } from "./retry.js";
import { fromConnectError } from "./status.js";

const CALL_SECONDS = 30;
// Long enough for 32k tokens at ten a second; a server that stops answering is noticed by keepalive long before.
const GENERATE_SECONDS = 3600;

/** One attempt of a call. */
export type Attempt<T> = (rpc: Rpc, options: RpcOptions) => Promise<T>;

/** Holds a call: it ends with its caller's signal and with its client. */
export interface Leash {
  readonly signal: AbortSignal;
  readonly cancel: () => void;
  /** The call has ended: nothing can stop it any more. */
  readonly release: () => void;
}

export class Link {
  readonly target: string;
  /** How many ids one append may carry; asked of the server once. */
  appendLimitTokens: number | undefined = undefined;
  /** Is a request that comes again known by its id? Found out where it matters. */
  knowsIds: boolean | undefined = undefined;
  readonly #channel: Channel;
  readonly #policy: FullPolicy;
  readonly #contact: Contact = { isMade: false };
  readonly #timeoutSeconds: number | null;
  readonly #generateTimeoutSeconds: number | null;
  readonly #running = new Set<() => void>();
  readonly #tls: ClientOptions["tls"];
  /** A connection was made once, or it was found out why not. */
  #isMet = false;
  #isClosed = false;

  constructor(target: string, options: ClientOptions) {
    this.target = target;
    this.#timeoutSeconds = secondsOf(orDefault(options.timeoutSeconds, CALL_SECONDS), "timeoutSeconds");
    this.#generateTimeoutSeconds = secondsOf(
      orDefault(options.generateTimeoutSeconds, GENERATE_SECONDS),
      "generateTimeoutSeconds",
    );
    this.#policy = retryPolicyOf(options.retry);
    this.#tls = options.tls ?? false;
    this.#channel = openChannel(target, options.apiKey, this.#tls);
  }

  get rpc(): Rpc {
    return this.#channel.rpc;
  }

  /** For a call of the session with this route, or of none. movesOn: see Patience. */
  patience(options: CallOptions, route = "", { movesOn = false } = {}): Patience {
    return this.#patience(options, this.#timeoutSeconds, route, movesOn);
  }

  generatePatience(options: CallOptions, route: string): Patience {
    return this.#patience(options, this.#generateTimeoutSeconds, route);
  }

  /** One attempt. Throws our own errors, or the reason of the caller's signal. */
  async once<T>(attempt: Attempt<T>, patience: Patience): Promise<T> {
    const leash = this.leash(patience.signal);
    try {
      const reply = await attempt(this.rpc, { signal: leash.signal, ...patience.rpcOptions });
      this.#isMet = true;
      patience.answered();
      return reply;
    } catch (error) {
      const explained = this.explain(error, patience);
      throw patience.isAborted ? explained : await this.#probed(explained);
    } finally {
      leash.release();
    }
  }

  /** A call that may be repeated, tried again while patience lasts. */
  async repeat<T>(attempt: Attempt<T>, patience: Patience): Promise<T> {
    for (let attempts = 1; ; attempts++) {
      try {
        return await this.once(attempt, patience);
      } catch (error) {
        await this.waitOrGiveUp(error, attempts, patience);
      }
    }
  }

  /** Wait as long as it takes before the next attempt, or throw `error`. */
  async waitOrGiveUp(error: unknown, attempts: number, patience: Patience): Promise<void> {
    const seconds = patience.waitSeconds(attempts, error);
    if (seconds === undefined) throw patience.verdict(error);
    await this.wait(seconds, patience);
  }

  /** Ends early, with what `explain` says, if the caller's signal or the client's end comes first. */
  async wait(seconds: number, patience: Patience): Promise<void> {
    const leash = this.leash(patience.signal);
    try {
      await this.waitOn(leash, seconds, patience);
    } finally {
      leash.release();
    }
  }

  /** As `wait`, for a call that is on its leash already. */
  async waitOn(leash: Leash, seconds: number, patience: Patience): Promise<void> {
    try {
      await sleep(seconds * 1000, undefined, { signal: leash.signal });
    } catch (stopped) {
      throw this.explain(stopped, patience);
    }
  }

  /** Throws StateError if the client is closed, and the signal's reason if it has spoken already. */
  leash(signal: AbortSignal | undefined): Leash {
    this.requireOpen();
    signal?.throwIfAborted();
    // A signal may live as long as its program: nothing of ours stays on it after the call.
    const controller = new AbortController();
    const cancel = (): void => {
      controller.abort();
    };
    signal?.addEventListener("abort", cancel, { once: true });
    this.#running.add(cancel);
    return {
      signal: controller.signal,
      cancel,
      release: () => {
        signal?.removeEventListener("abort", cancel);
        this.#running.delete(cancel);
      },
    };
  }

  /** What is thrown for a call that failed with `error`. */
  explain(error: unknown, patience: Patience): unknown {
    if (this.#isClosed) {
      return new StateError(`this client of ${this.target} was closed while the call was running`, { cause: error });
    }
    if (patience.isAborted) return patience.signal?.reason;
    return error instanceof ConnectError
      ? fromConnectError(error, this.target, { isLate: patience.isOver, isReached: this.#contact.isMade })
      : error;
  }

  /** `error`, or what a handshake finds to be wrong where no connection was ever made. */
  async #probed(error: unknown): Promise<unknown> {
    if (error instanceof KakeyaError && error.reason !== undefined) this.#isMet = true;
    const mayDiffer = error instanceof ConnectionFailed && !(error instanceof TLSFailed) && error.wasSent;
    if (this.#isMet || !mayDiffer || this.#isClosed) return error;
    this.#isMet = true;
    const found = await tlsMismatch(this.target, this.#tls ?? false);
    if (found === undefined) return error;
    const kind = found.isCertain ? TLSFailed : ConnectionFailed;
    return new kind(`no connection to ${this.target}: ${found.problem}`, { code: "UNAVAILABLE", cause: error });
  }

  get isClosed(): boolean {
    return this.#isClosed;
  }

  requireOpen(): void {
    if (!this.#isClosed) return;
    const closed = new StateError(`this client of ${this.target} is closed; make a new one`);
    closed.wasSent = false;
    throw closed;
  }

  close(): void {
    this.#isClosed = true;
    for (const cancel of this.#running) cancel();
    this.#channel.close();
  }

  #patience(options: CallOptions, seconds: number | null, route: string, movesOn = false): Patience {
    const given = secondsOf(orDefault(options.timeoutSeconds, seconds), "timeoutSeconds");
    return new Patience(this.#policy, given, { contact: this.#contact, signal: options.signal, route, movesOn });
  }
}

function orDefault<T>(value: T | undefined, fallback: T): T {
  return value === undefined ? fallback : value;
}
