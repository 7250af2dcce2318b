/** How long to keep trying: one deadline over all attempts of a call, and the waits between them. */
import { invalid, shown, wholeIn } from "./checks.js";
import { DeadlineExceeded, KakeyaError, TLSFailed, TransportError } from "./errors.js";
import { known } from "./options.js";

// A call that found its connection full waits for its turn like one that its own side holds back: that is no attempt.
const FULL_SECONDS = 60;
const FULL_DELAY_SECONDS = 0.02;
const LONGEST_FULL_DELAY_SECONDS = 1;
// How calls end that gRPC, a balancer or a proxy ended, without an explanation. Each is the same call again by its id.
const PASSING = new Set(["UNAVAILABLE", "CANCELLED", "UNKNOWN", "INTERNAL", "RESOURCE_EXHAUSTED"]);

/**
 * Waits between attempts of a call, after a lost connection or a call that something on the way ended, and where the
 * server says when to come again.
 *
 * The n-th wait is between half and all of `firstDelaySeconds` × 2^(n-1), at most `maxDelaySeconds`, and never less than
 * the server asked for. `attempts: 1` switches retries off. A stream's attempts count from its last token. Each request
 * has an id by which the server knows it again, so nothing is done twice.
 */
export interface RetryPolicy {
  /** Calls in all, the first one included. Default 4. */
  readonly attempts?: number;
  /** Default 0.2. */
  readonly firstDelaySeconds?: number;
  /** Default 5. */
  readonly maxDelaySeconds?: number;
}

/**
 * The policy with every number filled in. Throws InvalidArgument.
 *
 * @internal
 */
export function retryPolicyOf(policy: RetryPolicy = {}): Required<RetryPolicy> {
  const filled = { attempts: 4, firstDelaySeconds: 0.2, maxDelaySeconds: 5, ...known(policy, "RetryPolicy") };
  wholeIn(filled.attempts, "attempts", 1, 999);
  for (const name of ["firstDelaySeconds", "maxDelaySeconds"] as const) {
    if (!(Number.isFinite(filled[name]) && filled[name] >= 0)) {
      throw invalid(name, `must be a number of seconds of at least 0, got ${shown(filled[name])}`);
    }
  }
  return filled;
}

/**
 * One call's deadline, counted from now, with the policy for its attempts and the caller's signal.
 *
 * @internal
 */
export class Patience {
  readonly signal: AbortSignal | undefined;
  readonly #policy: Required<RetryPolicy>;
  readonly #deadline: number | null;
  /** By the server, and not answered since. */
  #lastReported: KakeyaError | undefined = undefined;
  /** Since the last answer. */
  #timesFull = 0;
  #fullSince = 0;

  constructor(policy: Required<RetryPolicy>, timeoutSeconds: number | null, signal?: AbortSignal) {
    this.signal = signal;
    this.#policy = policy;
    this.#deadline = timeoutSeconds === null ? null : performance.now() + timeoutSeconds * 1000;
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
    if (error instanceof TLSFailed || attempt >= this.#policy.attempts) return undefined;
    const asked = error.retryAfterSeconds;
    const isPassing =
      error.code === "UNAVAILABLE" ||
      (error instanceof TransportError &&
        error.reason === undefined &&
        error.code !== undefined &&
        PASSING.has(error.code));
    if (!isPassing && asked === undefined) return undefined;
    const longest = Math.min(this.#policy.maxDelaySeconds, this.#policy.firstDelaySeconds * 2 ** (attempt - 1));
    // Jitter, so that clients that got the same answer do not all come back at the same time.
    const jitter = Math.random();
    const delay = Math.max(longest * (0.5 + 0.5 * jitter), (asked ?? 0) * (1 + 0.2 * jitter));
    return this.#ifInTime(delay);
  }

  #fullWaitSeconds(): number | undefined {
    const now = performance.now();
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
    this.#lastReported = undefined;
    this.#timesFull = 0;
  }

  /** A deadline of its own, from now, for what has to follow even when this one has passed. */
  extended(timeoutSeconds: number): Patience {
    return new Patience(this.#policy, timeoutSeconds);
  }
}

function isUnexplained(error: unknown): boolean {
  return (error instanceof TransportError || error instanceof DeadlineExceeded) && error.reason === undefined;
}
