/** The header by which a proxy tells sessions apart; their ids are in messages, which it does not read. */
import { randomBytes } from "node:crypto";

export const ROUTE_HEADER = "kakeya-route";
const ROUTE_BYTES = 8;

/** What a proxy sends the calls of a session by: drawn before there is an id, so that creating it has one, too. */
export function newRoute(): string {
  return randomBytes(ROUTE_BYTES).toString("hex");
}

/** The route that the session was made with, by which its id begins; empty if it was made without one. */
export function routeOf(sessionId: string): string {
  return /^([0-9a-f]{16})\./.exec(sessionId)?.[1] ?? "";
}
