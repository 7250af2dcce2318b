/** The few moves every test makes. */
import { setTimeout as sleep } from "node:timers/promises";

import type { Session, SessionInfo, Strategy } from "../src/index.js";

export const PROMPT = [3, 14, 15, 92, 65, 35, 89, 79];
/** More than any machine generates while a test runs; only a session without a limit has room for it. */
export const LONG = 30_000;
/** A session without a length limit. */
export const ENDLESS: Strategy = { kind: "sink_window", sink: 4, window: 32 };

/** The session's info once no Generate runs on it. */
export async function untilIdle(session: Session): Promise<SessionInfo> {
  for (;;) {
    const info = await session.info();
    if (!info.isGenerating) return info;
  }
}

/** The stream is not read, and the server has stopped: its history grows no more, or the Generate has ended. */
export async function untilStill(session: Session): Promise<SessionInfo> {
  for (let last = -1; ;) {
    const info = await session.info();
    if (!info.isGenerating || info.historyLength === last) return info;
    last = info.historyLength;
    await sleep(200);
  }
}

/** The first `count` ids of a stream; then the loop is left by `break`. */
export async function read(stream: AsyncIterable<number>, count = Infinity): Promise<number[]> {
  const ids: number[] = [];
  for await (const id of stream) {
    ids.push(id);
    if (ids.length === count) break;
  }
  return ids;
}

/** What a promise or a function fails with. Fails itself if there is no error of that class. */
export async function failure<E extends Error>(
  kind: abstract new (...args: never[]) => E,
  of: Promise<unknown> | (() => unknown),
): Promise<E> {
  try {
    await (typeof of === "function" ? of() : of);
  } catch (error) {
    if (error instanceof kind) return error;
    throw error;
  }
  throw new Error(`expected ${kind.name}, but nothing failed`);
}
