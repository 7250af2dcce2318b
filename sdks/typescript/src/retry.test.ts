/** When a call is tried again, and what counts as an attempt: a link whose calls end as each test says. */
import { afterEach, expect, test, vi } from "vitest";

import { failure } from "../testing/moves.js";
import { Append, Tail } from "./append.js";
import type { Rpc } from "./channel.js";
import { ConnectionFailed, Draining, type KakeyaError, Overloaded, SessionNotFound } from "./errors.js";
import { Link } from "./link.js";
import { Patience, retryPolicyOf, type RetryPolicy } from "./retry.js";
import { Session } from "./session.js";
import type { SessionFacts } from "./values.js";

let link: Link | undefined;
afterEach(() => {
  link?.close();
  link = undefined;
  vi.useRealTimers();
});

function linked(rpc: Partial<Rpc>, retry: RetryPolicy = {}): Link {
  const made = new Link("127.0.0.1:9", { retry });
  vi.spyOn(made, "rpc", "get").mockReturnValue(rpc as Rpc);
  made.appendLimitTokens = 1;
  link = made;
  return made;
}

function notSent(message: string, isFull: boolean): ConnectionFailed {
  const error = new ConnectionFailed(message, { code: "UNAVAILABLE" });
  error.wasSent = false;
  error.isFull = isFull;
  return error;
}

test("what one request of an append waited for its turn is no attempt of the next", async () => {
  let sent = 0;
  const appendTokens = (): Promise<never> => {
    sent += 1;
    if (sent === 4) return Promise.resolve({ historyLength: 1n } as never);
    return Promise.reject(notSent(sent < 4 ? "full" : "lost", sent < 4));
  };
  const link = linked({ appendTokens }, { attempts: 1 });
  const append = new Append(link, "s1", [1, 2], new Tail(0), undefined, link.patience({}));
  const error = await failure(ConnectionFailed, append.run());
  expect([error.message, error.appendedTokens, sent]).toEqual(["lost", 1, 5]);
});

test("closing a session that never was is an error though the connection was full", async () => {
  const fates = [
    notSent("full", true),
    new SessionNotFound("none", { code: "NOT_FOUND", reason: "SESSION_NOT_FOUND" }),
  ];
  const link = linked({ closeSession: () => Promise.reject(fates.shift() ?? new Error("no more")) });
  const session = Session.opened(link, { id: "gone", historyLength: 5 } as SessionFacts, "");
  await failure(SessionNotFound, session.close());
  expect(session.isClosed).toBe(false);
});

test("what a signal was aborted with is thrown as it is, whatever its class", async () => {
  // Of a class that would be tried again, looked into, or reported as what the server said before.
  const reason = new ConnectionFailed("another call's", { code: "UNAVAILABLE" });
  const abort = new AbortController();
  const patience = new Patience(retryPolicyOf(), null, { signal: abort.signal });
  const draining = new Draining("shutting down", { code: "UNAVAILABLE", reason: "DRAINING" });
  expect(patience.waitSeconds(1, draining)).toBeGreaterThan(0);
  abort.abort(reason);
  expect(patience.waitSeconds(1, reason)).toBeUndefined();
  expect(patience.verdict(reason)).toBe(reason);
  const closeSession = vi.fn(() => Promise.reject(new Error("not sent")));
  const link = linked({ closeSession });
  const session = Session.opened(link, { id: "s1", historyLength: 5 } as SessionFacts, "");
  expect(await failure(ConnectionFailed, session.close({ signal: abort.signal }))).toBe(reason);
  expect(closeSession).not.toHaveBeenCalled();
});

/** Waits as it is asked to until it is given up; `taking`: how long each attempt takes. Returns the seconds of it all. */
function untilGivenUp(waiting: Patience, error: KakeyaError, taking = 0): [number, number] {
  const began = performance.now();
  for (let attempt = 1; attempt < 10_000; attempt++) {
    vi.advanceTimersByTime(taking * 1000);
    const seconds = waiting.waitSeconds(attempt, error);
    if (seconds === undefined) return [attempt, (performance.now() - began) / 1000];
    vi.advanceTimersByTime(seconds * 1000);
  }
  throw new Error("it is never given up");
}

function patienceOf(policy: RetryPolicy = {}, isReached = true, timeoutSeconds: number | null = null): Patience {
  vi.useFakeTimers({ toFake: ["performance"] });
  return new Patience(retryPolicyOf(policy), timeoutSeconds, { contact: { isMade: isReached } });
}

const sent = new ConnectionFailed("lost", { code: "UNAVAILABLE" });
const unsent = notSent("refused", false);

test("a server that was there is waited for until patience ends, and tried at its end", () => {
  const [attempts, seconds] = untilGivenUp(patienceOf(), unsent);
  expect(attempts).toBeGreaterThan(10);
  expect(seconds).toBeCloseTo(30, 0);
});

test("a server that was never there is given up soon, a connection that breaks was one", () => {
  expect(untilGivenUp(patienceOf({}, false), unsent)[1]).toBeCloseTo(2, 1);
  expect(untilGivenUp(patienceOf({}, false), sent)[1]).toBeCloseTo(30, 0);
});

test("an attempt that the server worked on for long does not use patience up", () => {
  expect(untilGivenUp(patienceOf({ patienceSeconds: 10 }), sent, 40)[0]).toBeGreaterThan(5);
  expect(untilGivenUp(patienceOf({ patienceSeconds: 10 }), unsent, 40)[0]).toBe(2);
});

test("with an answer patience begins anew", () => {
  const waiting = patienceOf();
  for (let round = 0; round < 3; round++) {
    expect(untilGivenUp(waiting, unsent)[1]).toBeCloseTo(30, 0);
    waiting.answered();
  }
});

test("a wait that a server asks for that goes may outlast patience once", () => {
  const asked = new Draining("draining", { code: "UNAVAILABLE", reason: "DRAINING", retryAfterSeconds: 7 });
  const [attempts, seconds] = untilGivenUp(patienceOf({ patienceSeconds: 1 }), asked);
  expect(attempts).toBe(2);
  expect(seconds).toBeGreaterThanOrEqual(7);
});

test.each([0.05, 7])("patience does not end while the server says to come back after %d s", (retryAfterSeconds) => {
  const about = { code: "RESOURCE_EXHAUSTED", reason: "OVERLOADED", retryAfterSeconds };
  const refused = new Overloaded("later", about);
  const [attempts, seconds] = untilGivenUp(patienceOf({ patienceSeconds: 1 }, true, 600), refused);
  expect(attempts).toBeGreaterThan(70);
  expect(seconds).toBeGreaterThan(590);
  expect(seconds).toBeLessThan(600);
  // Then it is gone: patience counts from its last answer.
  expect(untilGivenUp(patienceOf({ patienceSeconds: 1 }), sent)[1]).toBeCloseTo(1, 1);
  expect(untilGivenUp(patienceOf({ attempts: 3 }), refused)[0]).toBe(3);
  expect(untilGivenUp(patienceOf({ patienceSeconds: 0 }), refused)[0]).toBe(1);
});

test("no wait is longer than a timer can be", () => {
  const retryAfterSeconds = 3e6;
  const asked = new Draining("draining", { code: "UNAVAILABLE", reason: "DRAINING", retryAfterSeconds });
  const waiting = patienceOf({ firstDelaySeconds: 99_999, maxDelaySeconds: 99_999, patienceSeconds: 1e9 });
  for (const error of [unsent, asked]) {
    const seconds = waiting.waitSeconds(3, error);
    expect(seconds).toBeGreaterThan(40_000);
    expect(seconds).toBeLessThanOrEqual(99_999);
  }
});

test("calls that fail at once are not sent in a busy loop, and without patience once", () => {
  const [attempts] = untilGivenUp(patienceOf({ firstDelaySeconds: 0, maxDelaySeconds: 0, patienceSeconds: 1 }), sent);
  expect(attempts).toBeLessThan(110);
  expect(untilGivenUp(patienceOf({ patienceSeconds: 0 }), sent)[0]).toBe(1);
});
