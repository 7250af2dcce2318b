/** When a call is tried again, and what counts as an attempt: a link whose calls end as each test says. */
import { afterEach, expect, test, vi } from "vitest";

import { failure } from "../testing/moves.js";
import { Append, Tail } from "./append.js";
import type { Rpc } from "./channel.js";
import { ConnectionFailed, Draining, SessionNotFound } from "./errors.js";
import { Link } from "./link.js";
import { Patience, retryPolicyOf, type RetryPolicy } from "./retry.js";
import { Session } from "./session.js";
import type { SessionFacts } from "./values.js";

let link: Link;
afterEach(() => {
  link.close();
});

function linked(rpc: Partial<Rpc>, retry: RetryPolicy = {}): Link {
  link = new Link("127.0.0.1:9", { retry });
  vi.spyOn(link, "rpc", "get").mockReturnValue(rpc as Rpc);
  link.appendLimitTokens = 1;
  return link;
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
  linked({ appendTokens }, { attempts: 1 });
  const append = new Append(link, "s1", [1, 2], new Tail(0), undefined, link.patience({}));
  const error = await failure(ConnectionFailed, append.run());
  expect([error.message, error.appendedTokens, sent]).toEqual(["lost", 1, 5]);
});

test("closing a session that never was is an error though the connection was full", async () => {
  const fates = [
    notSent("full", true),
    new SessionNotFound("none", { code: "NOT_FOUND", reason: "SESSION_NOT_FOUND" }),
  ];
  linked({ closeSession: () => Promise.reject(fates.shift() ?? new Error("no more")) });
  const session = Session.opened(link, { id: "gone", historyLength: 5 } as SessionFacts);
  await failure(SessionNotFound, session.close());
  expect(session.isClosed).toBe(false);
});

test("what a signal was aborted with is thrown as it is, whatever its class", async () => {
  // Of a class that would be tried again, looked into, or reported as what the server said before.
  const reason = new ConnectionFailed("another call's", { code: "UNAVAILABLE" });
  const abort = new AbortController();
  const patience = new Patience(retryPolicyOf(), null, abort.signal);
  const draining = new Draining("shutting down", { code: "UNAVAILABLE", reason: "DRAINING" });
  expect(patience.waitSeconds(1, draining)).toBeGreaterThan(0);
  abort.abort(reason);
  expect(patience.waitSeconds(1, reason)).toBeUndefined();
  expect(patience.verdict(reason)).toBe(reason);
  const closeSession = vi.fn(() => Promise.reject(new Error("not sent")));
  linked({ closeSession });
  const session = Session.opened(link, { id: "s1", historyLength: 5 } as SessionFacts);
  expect(await failure(ConnectionFailed, session.close({ signal: abort.signal }))).toBe(reason);
  expect(closeSession).not.toHaveBeenCalled();
});
