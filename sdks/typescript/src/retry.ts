/**
 * Retries: how long a call waits for its server, and the waits between its attempts.
 *
 * A call has a deadline over all its attempts. Within it, patience counts the time without the server since its last
 * answer: the waits, and attempts that found no connection. A prefill that takes long does not use it up, and a refusal
 * that says when to come back is an answer, but for one of a server that serves nothing: one that drains, or has stalled.
 */
import { invalid, MAX_SECONDS, shown, wholeIn } from "./checks.js";
import { DeadlineExceeded, KakeyaError, TLSFailed, TransportError } from "./errors.js";
import { known } from "./options.js";
import { newRoute, ROUTE_HEADER } from "./route.js";

// How long to look for a server that this client has never reached: it may be starting, or the address is wrong.
const FIRST_CONTACT_SECONDS = 2;
// A call that found its connection full waits for its turn like one that its own side holds back: that is no attempt.
const FULL_SECONDS = 60;
const FULL_DELAY_SECONDS = 0.02;
const LONGEST_FULL_DELAY_SECONDS = 1;
// How calls end that gRPC, a balancer or a proxy ended, without an explanation. Each is the same call again by its id.
const PASSING = new Set(["UNAVAILABLE", "CANCELLED", "UNKNOWN", "INTERNAL", "RESOURCE_EXHAUSTED"]);
// Every wait but the first is at least so long, whatever the policy says: no call is sent again in a busy loop.
const LEAST_DELAY_SECONDS = 0.02;
// Timers are that exact: what is left of patience when its last wait has ended.
const LEAST_LEFT_SECONDS = 0.001;

/**
 * How long a call waits for its server: after a lost connection or a call that something on the way ended, and where the
 * server says when to come again.
 *
 * `patienceSeconds` is the time without an answer after which a call is given up; it is meant to be longer than a restart
 * of the server. Time counts from the last answer, for a stream from its last token, and never beyond the call's timeout.
 * A refusal that says when to come again is an answer, so such a call ends with its timeout only, but a server that
 * drains or has stalled counts as away. One that this client has never reached is given up after 2 s.
 *
 * The n-th wait is between half and all of `firstDelaySeconds` × 2^(n-1), at most `maxDelaySeconds`, and never less than
 * the server asked for; none is longer than 99,999 seconds, nor may a delay be. `attempts` limits the number of attempts
 * as well: 1 switches retries off. Each request has an id by which the server knows it again, so nothing is done twice.
 */
export interface RetryPolicy {
  /** Calls in all, the first one included. Default: as many as patience allows. */
  readonly attempts?: number;
  /** Default 0.2. */
  readonly firstDelaySeconds?: number;
  /** Default 2. */
  readonly maxDelaySeconds?: number;
  /** Default 30. */
  readonly patienceSeconds?: number;
}

/**
 * A policy with every number filled in.
 *
 * @internal
 */
export type FullPolicy = Required<Omit<RetryPolicy, "attempts">> & { readonly attempts: number | undefined };

/**
 * Has this client ever reached its server? Shared by all calls of a client.
 *
 * @internal
 */
export interface Contact {
  isMade: boolean;
}

/**
 * The policy with every number filled in. Throws InvalidArgument.
 *
 * @internal
 */
export function retryPolicyOf(policy: RetryPolicy = {}): FullPolicy {
  const filled = {
    attempts: undefined,
    firstDelaySeconds: 0.2,
    maxDelaySeconds: 2,
    patienceSeconds: 30,
    ...known(policy, "RetryPolicy"),
  };
  if (filled.attempts !== undefined) wholeIn(filled.attempts, "attempts", 1, 999);
  for (const name of ["firstDelaySeconds", "maxDelaySeconds", "patienceSeconds"] as const) {
    if (!(Number.isFinite(filled[name]) && filled[name] >= 0)) {
      throw invalid(name, `must be a number of seconds of at least 0, got ${shown(filled[name])}`);
    }
  }
  for (const name of ["firstDelaySeconds", "maxDelaySeconds"] as const) {
    if (filled[name] > MAX_SECONDS) {
      throw invalid(name, `must be at most ${MAX_SECONDS} seconds, got ${shown(filled[name])}`);
    }
  }
  return filled;
}

/**
 * One call's deadline, counted from now, how long it goes on without its server, the caller's signal, and the route of
 * the session that it is for.
 *
 * @internal
 */
export class Patience {
  readonly signal: AbortSignal | undefined;
  readonly #policy: FullPolicy;
  readonly #contact: Contact;
  /**
   * With `movesOn`, another one from the second time on that the server is away: the first repeat goes where the call
   * went, whose answer may be there, and another route may lead to a server that is not away.
   */
  #route: string;
  readonly #movesOn: boolean;
  #timesAway = 0;
  readonly #deadline: number | null;
  /** By the server, and not answered since. */
  #lastReported: KakeyaError | undefined = undefined;
  /** Since the last answer. */
  #timesFull = 0;
  #fullSince = 0;
  /** The last time; undefined: the server has answered since. */
  #failedAt: number | undefined = undefined;
  /** That followed. */
  #lastDelay = 0;
  /** Seconds since the last answer. */
  #withoutServer = 0;

  constructor(
    policy: FullPolicy,
    timeoutSeconds: number | null,
    about: {
      readonly contact?: Contact;
      readonly signal?: AbortSignal | undefined;
      readonly route?: string;
      readonly movesOn?: boolean;
    } = {},
  ) {
    this.signal = about.signal;
    this.#policy = policy;
    this.#contact = about.contact ?? { isMade: false };
    this.#route = about.route ?? "";
    this.#movesOn = about.movesOn ?? false;
    this.#deadline = timeoutSeconds === null ? null : performance.now() + timeoutSeconds * 1000;
  }

  get route(): string {
    return this.#route;
  }

  /** What each attempt is called with, beside its signal. */
  get rpcOptions(): { readonly timeoutMs?: number; readonly headers?: Record<string, string> } {
    const timeoutMs = this.remainingMs();
    return {
      ...(timeoutMs === undefined ? {} : { timeoutMs }),
      ...(this.#route === "" ? {} : { headers: { [ROUTE_HEADER]: this.#route } }),
    };
  }

  /** Time left, never below 0; undefined if there is no deadline. */
  remainingMs(): number | undefined {
    return this.#deadline === null ? undefined : Math.max(0, Math.ceil(this.#deadline - performance.now()));
  }

  get isOver(): boolean {
    return this.remainingMs() === 0;
  }

  /** The caller's signal has spoken. */
  get isAborted(): boolean {
    return this.signal?.aborted === true;
  }

  /** Is `error` what the caller's signal was aborted with? Then it does not describe this call, whatever its class. */
  isReason(error: unknown): boolean {
    return this.isAborted && this.signal?.reason === error;
  }

  /** How long to wait before the next attempt, after attempt number `attempt` (from 1); undefined to give up. */
  waitSeconds(attempt: number, error: unknown): number | undefined {
    if (this.isAborted || !(error instanceof KakeyaError)) return undefined;
    if (error.isFull) return this.#fullWaitSeconds();
    attempt -= this.#timesFull;
    if (error.reason !== undefined) this.#lastReported = error;
    if (error.wasSent) this.#contact.isMade = true;
    if (this.#movesOn && error.code === "UNAVAILABLE" && ++this.#timesAway > 1) this.#route = newRoute();
    let spent = this.#timeWithoutServer(error);
    if (error instanceof TLSFailed) return undefined;
    const asked = error.retryAfterSeconds;
    // One that drains or has stalled serves nothing.
    if (asked !== undefined && error.code !== "UNAVAILABLE") spent = this.#withoutServer = 0;
    const isPassing =
      error.code === "UNAVAILABLE" ||
      (error instanceof TransportError &&
        error.reason === undefined &&
        error.code !== undefined &&
        PASSING.has(error.code));
    if (!isPassing && asked === undefined) return undefined;
    const { attempts, firstDelaySeconds, maxDelaySeconds, patienceSeconds } = this.#policy;
    const left = (this.#contact.isMade ? patienceSeconds : Math.min(FIRST_CONTACT_SECONDS, patienceSeconds)) - spent;
    if (left < LEAST_LEFT_SECONDS || (attempts !== undefined && attempt >= attempts)) return undefined;
    let longest = Math.min(maxDelaySeconds, firstDelaySeconds * 2 ** (attempt - 1));
    if (attempt > 1) longest = Math.max(longest, LEAST_DELAY_SECONDS);
    // Jitter, so that clients that got the same answer do not all come back at the same time.
    const jitter = Math.random();
    // The last attempt is at the end of patience, or when the server asks for it.
    longest = Math.max(Math.min(longest * (0.5 + 0.5 * jitter), left), (asked ?? 0) * (1 + 0.2 * jitter));
    // A timer that is to wait for much longer ends at once.
    this.#lastDelay = Math.min(longest, MAX_SECONDS);
    return this.#ifInTime(this.#lastDelay);
  }

  /** Seconds since its last answer, less those in which an attempt that was sent waited for one. */
  #timeWithoutServer(error: KakeyaError): number {
    const now = performance.now();
    if (this.#failedAt !== undefined) {
      this.#withoutServer += error.wasSent ? this.#lastDelay : (now - this.#failedAt) / 1000;
    }
    this.#failedAt = now;
    return this.#withoutServer;
  }

  #fullWaitSeconds(): number | undefined {
    const now = performance.now();
    // It is there.
    this.#failedAt = undefined;
    if (this.#timesFull === 0) this.#fullSince = now;
    if (now - this.#fullSince >= FULL_SECONDS * 1000) return undefined;
    const longest = Math.min(LONGEST_FULL_DELAY_SECONDS, FULL_DELAY_SECONDS * 2 ** this.#timesFull);
    this.#timesFull += 1;
    return this.#ifInTime(longest * (0.5 + 0.5 * Math.random()));
  }

  #ifInTime(delay: number): number | undefined {
    const remaining = this.remainingMs();
    return remaining === undefined || delay * 1000 < remaining ? delay : undefined;
  }

  /**
   * What to throw when giving up with `error`: the last reason that the server gave, if it gave one.
   *
   * A server that drains says so and then refuses connections: the first is why, the second only what follows.
   */
  verdict(error: unknown): unknown {
    const reported = this.#lastReported;
    if (reported === undefined || reported === error || this.isAborted || !isUnexplained(error)) return error;
    reported.cause = error;
    return reported;
  }

  /** The server answers again: what it said before is no reason for what comes. */
  answered(): void {
    this.#contact.isMade = true;
    this.#lastReported = undefined;
    this.#timesFull = 0;
    this.#failedAt = undefined;
    this.#withoutServer = 0;
  }

  /** A deadline of its own, from now, for what has to follow even when this one has passed. */
  extended(timeoutSeconds: number): Patience {
    return new Patience(this.#policy, timeoutSeconds, { contact: this.#contact, route: this.#route });
  }
}

function isUnexplained(error: unknown): boolean {
  return (error instanceof TransportError || error instanceof DeadlineExceeded) && error.reason === undefined;
}
