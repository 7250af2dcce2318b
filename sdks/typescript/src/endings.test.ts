/** How calls end whose server goes away: what is reported, how often it was tried, and what is complete anyway. */
import { setTimeout as sleep } from "node:timers/promises";

import { Code, ConnectError } from "@connectrpc/connect";
import { afterEach, expect, test } from "vitest";

import { failure } from "../testing/moves.js";
import { away, draining, elsewhere, mismatch, scripted, type Script, type Scripted } from "../testing/scripted.js";
import { ErrorInfoSchema } from "./generated/google/rpc/error_details_pb.js";
import type { ForkSessionRequest, GenerateRequest } from "./generated/kakeya/v1/runtime_pb.js";
import * as kakeya from "./index.js";

const QUICK: kakeya.RetryPolicy = { attempts: 4, firstDelaySeconds: 0 };
let server: Scripted;
let client: kakeya.Client;
afterEach(async () => {
  await client.close();
  await server.close();
});

async function serve(script: Script, retry = QUICK): Promise<kakeya.Client> {
  server = await scripted({
    createSession: () => ({ sessionId: "s1" }),
    getServerInfo: () => ({ maxAppendTokens: 100, maxMessageBytes: 4 * 2 ** 20 }),
    ...script,
  });
  client = new kakeya.Client(server.target, { retry });
  return client;
}

const token = (position: number) => ({
  payload: { case: "token" as const, value: { tokenId: position + 100, position: BigInt(position) } },
});
const done = (count: number) => ({
  payload: { case: "done" as const, value: { generatedTokenCount: count, historyLength: BigInt(count) } },
});
const accepted = { payload: { case: "accepted" as const, value: { prefillTokenCount: 8n } } };
const progress = { payload: { case: "progress" as const, value: { doneTokenCount: 4n, totalTokenCount: 8n } } };

test("a stream asks for a heartbeat, which is reported only if something has changed", async () => {
  const beat = { payload: { case: "progress" as const, value: { doneTokenCount: 0n, totalTokenCount: 8n } } };
  const early = { payload: { case: "progress" as const, value: {} } };
  const asked: (number | undefined)[] = [];
  await serve({
    async *generate(request: GenerateRequest) {
      asked.push(request.heartbeatSeconds);
      await Promise.resolve();
      yield* [early, early, accepted, beat, beat, progress, progress, token(8), done(1)];
    },
  });
  const reports: number[] = [];
  const session = await client.createSession();
  await session.generate(1, { onProgress: ({ doneTokens }) => reports.push(doneTokens) }).result();
  expect([asked, reports]).toEqual([[15], [0, 4]]);
});

test("a server too old to know its model's ends is warned of once", async () => {
  const warnings: Error[] = [];
  const onWarning = (warning: Error): void => void warnings.push(warning);
  process.on("warning", onWarning);
  let knows = true;
  await serve({ createSession: () => ({ sessionId: "s1", ...(knows ? { eosTokenIds: { tokenIds: [] } } : {}) }) });
  await client.createSession();
  knows = false;
  await client.createSession({ eosTokenIds: [] });
  await sleep(0);
  expect(warnings).toEqual([]);
  await client.createSession();
  await client.createSession();
  await sleep(0);
  process.off("warning", onWarning);
  expect(warnings.map(({ name }) => name)).toEqual(["KakeyaWarning"]);
  expect(warnings[0]?.message).toContain("nothing ends a Generate but its maxTokens");
});

test.each([false, true])("a stream that gives no token is tried four times, progress reported: %s", async (reports) => {
  let calls = 0;
  const session = await (
    await serve({
      async *generate() {
        calls += 1;
        yield accepted;
        yield progress;
        await sleep(5);
        server.cut();
      },
    })
  ).createSession();
  const seen: kakeya.Progress[] = [];
  const onProgress = reports ? (each: kakeya.Progress): void => void seen.push(each) : undefined;
  await failure(kakeya.ConnectionFailed, session.generate(4, { onProgress }).result());
  expect(calls).toBe(4);
  expect(seen.length > 0).toBe(reports);
});

test("attempts count from the last token", async () => {
  let calls = 0;
  const session = await (
    await serve({
      async *generate({ resumeFrom }) {
        calls += 1;
        const next = Number(resumeFrom ?? 0n);
        yield token(next);
        if (next === 9) yield done(10);
        else await sleep(5).then(server.cut);
      },
    })
  ).createSession();
  const result = await session.generate(10).result();
  expect(result.tokenIds).toEqual([100, 101, 102, 103, 104, 105, 106, 107, 108, 109]);
  expect(calls).toBe(10);
});

test.each([Code.Canceled, Code.Unknown, Code.Internal, Code.Unavailable])(
  "a stream that a proxy ended with code %i goes on, and one that the server ended does not",
  async (code) => {
    const asked: (bigint | undefined)[] = [];
    const session = await (
      await serve({
        async *generate({ resumeFrom }) {
          asked.push(resumeFrom);
          await Promise.resolve();
          const next = Number(resumeFrom ?? 0n);
          yield token(next);
          if (next === 0) throw new ConnectError("a proxy's", code);
          const detail = { desc: ErrorInfoSchema, value: { domain: "kakeya.v1", reason: "INVENTED_LATER" } };
          throw new ConnectError("the server's", Code.Internal, undefined, [detail]);
        },
      })
    ).createSession();
    const stream = session.generate(4);
    const error = await failure(kakeya.KakeyaError, stream.result());
    expect([error.reason, stream.tokenIds, asked]).toEqual(["INVENTED_LATER", [100, 101], [undefined, 1n]]);
  },
);

test.each(["the connection breaks", "an error follows"])(
  "a stream is complete once it is done, when %s",
  async (how) => {
    let calls = 0;
    const session = await (
      await serve({
        async *generate() {
          calls += 1;
          yield token(0);
          yield done(1);
          await sleep(5);
          if (how === "the connection breaks") server.cut();
          throw draining(0);
        },
      })
    ).createSession();
    const stream = session.generate(4);
    expect((await stream.result()).tokenIds).toEqual([100]);
    expect(stream.isFinished).toBe(true);
    expect([calls, session.historyLength]).toEqual([1, 1]);
  },
);

test("a frame behind the last one is an error of the server's", async () => {
  const session = await (
    await serve({
      async *generate() {
        await Promise.resolve();
        yield token(0);
        yield done(1);
        yield token(1);
      },
    })
  ).createSession();
  const error = await failure(kakeya.ProtocolError, session.generate(4).result());
  expect(error.message).toContain("after the last one");
});

test("a refused connection after a drain is reported as draining", async () => {
  const gone: Promise<void>[] = [];
  const session = await (
    await serve({
      getSessionInfo: () => {
        setTimeout(() => gone.push(server.close()), 5);
        throw draining(0.1);
      },
    })
  ).createSession();
  const error = await failure(kakeya.Draining, session.info());
  expect(error.retryAfterSeconds).toBe(0.1);
  expect((error.cause as Error).message).toContain("ECONNREFUSED");
  await Promise.all(gone);
  server = await scripted({}); // for afterEach
});

test("a stream that a drain ended is reported as draining, not as the refused connection that follows", async () => {
  const gone: Promise<void>[] = [];
  const session = await (
    await serve({
      async *generate() {
        yield token(0);
        await sleep(5);
        setTimeout(() => gone.push(server.close()), 5);
        throw draining(0.1);
      },
    })
  ).createSession();
  const stream = session.generate(4);
  const error = await failure(kakeya.Draining, stream.result());
  expect(error.cause).toBeInstanceOf(kakeya.ConnectionFailed);
  expect(stream.tokenIds).toEqual([100]);
  await Promise.all(gone);
  server = await scripted({});
});

test("an append that a drain refused has appended nothing, and says so", async () => {
  const gone: Promise<void>[] = [];
  const session = await (
    await serve({
      appendTokens: () => {
        setTimeout(() => gone.push(server.close()), 5);
        throw draining(0.1);
      },
    })
  ).createSession();
  const error = await failure(kakeya.Draining, session.append([1, 2]));
  expect(error.appendedTokens).toBe(0);
  await Promise.all(gone);
  server = await scripted({});
});

/**
 * A server's history, and what becomes of each append: it is lost, it arrives unanswered or is not safe yet, or its answer
 * comes.
 */
function history(
  fates: ("answered" | "lost" | "unanswered" | "pending" | "elsewhere" | "gone")[],
  options: { knowsIds: boolean; ids?: number },
): Script {
  const known = new Map<string, bigint>();
  let length = BigInt(options.ids ?? 0);
  return {
    getSessionInfo: () => {
      if (fates.includes("gone")) server.cut();
      return { historyLength: length };
    },
    appendTokens: ({ tokenIds, requestId, expectedHistoryLength }) => {
      const id = Buffer.from(requestId).toString("hex");
      const fate = fates[0] === "gone" ? "gone" : (fates.shift() ?? "answered");
      const earlier = options.knowsIds ? known.get(id) : undefined;
      if (fate === "lost" || fate === "gone") server.cut();
      else if (earlier !== undefined) return { historyLength: earlier, replayed: true };
      else if (expectedHistoryLength !== undefined && expectedHistoryLength !== length) throw mismatch(length);
      else {
        length += BigInt(tokenIds.length);
        known.set(id, length);
        if (fate === "unanswered") server.cut();
        if (fate === "pending") throw away(true);
        if (fate === "elsewhere") throw elsewhere(true);
      }
      return { historyLength: length };
    },
  };
}

test.each(["lost", "unanswered", "pending", "elsewhere"] as const)(
  "an append that was %s goes where it belongs, whatever the length",
  async (fate) => {
    const session = await (await serve(history([fate], { knowsIds: true, ids: 2 }))).createSession();
    // The client does not know that the history has two tokens already, as after a stream that was left.
    expect(await session.append([7, 8]).catch((error: unknown) => error)).toBe(4);
  },
);

test("a history that lost tokens is an error, and gets nothing", async () => {
  let length = 0n;
  const session = await (
    await serve({
      appendTokens: ({ tokenIds, expectedHistoryLength }) => {
        if (expectedHistoryLength !== length) throw mismatch(length);
        length += BigInt(tokenIds.length);
        return { historyLength: length };
      },
    })
  ).createSession();
  expect(await session.append([1, 2, 3])).toBe(3);
  // The server goes on from a backup.
  length = 1n;
  const error = await failure(kakeya.HistoryBehindClient, session.append([4]));
  expect([error.expected, error.actual, error.appendedTokens]).toEqual([3, 1, 0]);
  expect(length).toBe(1n);
  // After the error the caller may go on from there.
  expect(await session.append([4])).toBe(2);
});

/** A history that grows by a token for each Generate that names its length, and the requests it saw. */
function generating(length: bigint): { script: Script; requests: GenerateRequest[]; length: () => bigint } {
  const requests: GenerateRequest[] = [];
  const script: Script = {
    // eslint-disable-next-line @typescript-eslint/require-await -- a server's stream is one
    async *generate(request) {
      requests.push(request);
      if (request.expectedHistoryLength !== length) throw mismatch(length, request.expectedHistoryLength);
      yield token(Number(length));
      length += 1n;
      yield { payload: { case: "done" as const, value: { generatedTokenCount: 1, historyLength: length } } };
    },
    appendTokens: () => ({ historyLength: 5n }),
  };
  return { script, requests, length: () => length };
}

test("nothing is generated from a history that lost tokens", async () => {
  // The server goes on from a backup.
  const server = generating(2n);
  const session = await (await serve(server.script)).createSession();
  expect(await session.append([1, 2, 3, 4, 5])).toBe(5);
  const stream = session.generate(1);
  for (let time = 0; time < 2; time++) {
    const error = await failure(kakeya.HistoryBehindClient, stream.result());
    expect([error.expected, error.actual, error.code]).toEqual([5, 2, "DATA_LOSS"]);
    expect(error.cause).toBeInstanceOf(kakeya.HistoryLengthMismatch);
  }
  expect([server.length(), session.historyLength]).toEqual([2n, 2]);
  // After the error the caller may go on from there.
  expect((await session.generate(1).result()).historyLength).toBe(3);
});

test("a Generate begins at the end of a history that is longer than its client knew", async () => {
  const server = generating(4n);
  const session = await (await serve(server.script)).createSession();
  expect((await session.generate(1).result()).tokenIds).toEqual([104]);
  expect(session.historyLength).toBe(5);
  expect(server.requests.map((each) => each.expectedHistoryLength)).toEqual([0n, 4n]);
  // The same id with another length would be refused.
  expect(server.requests[0]?.requestId).not.toEqual(server.requests[1]?.requestId);
  await failure(kakeya.HistoryLengthMismatch, session.generate(1, { expectedHistoryLength: 3 }).result());
  expect(server.requests.length).toBe(3);
});

/** Forks a history of this length for a request that names it, and no other. */
function forking(length: bigint): { script: Script; requests: ForkSessionRequest[] } {
  const requests: ForkSessionRequest[] = [];
  const script: Script = {
    forkSession: (request) => {
      requests.push(request);
      if (request.expectedHistoryLength !== length) throw mismatch(length, request.expectedHistoryLength);
      return { sessionId: "s2", historyLength: length };
    },
    appendTokens: () => ({ historyLength: 5n }),
  };
  return { script, requests };
}

test("a history that lost tokens is not forked", async () => {
  // The server goes on from a backup.
  const server = forking(2n);
  const session = await (await serve(server.script)).createSession();
  expect(await session.append([1, 2, 3, 4, 5])).toBe(5);
  const error = await failure(kakeya.HistoryBehindClient, session.fork());
  expect([error.expected, error.actual, session.historyLength]).toEqual([5, 2, 2]);
  expect(error.cause).toBeInstanceOf(kakeya.HistoryLengthMismatch);
  // After the error the caller may go on from there.
  expect((await session.fork()).historyLength).toBe(2);
  expect(server.requests.length).toBe(2);
});

test("a fork has all of a history that is longer than its client knew", async () => {
  const server = forking(4n);
  const session = await (await serve(server.script)).createSession();
  expect([(await session.fork()).historyLength, session.historyLength]).toEqual([4, 4]);
  expect(server.requests.map((each) => each.expectedHistoryLength)).toEqual([0n, 4n]);
  // The same id with another length would be refused.
  expect(server.requests[0]?.requestId).not.toEqual(server.requests[1]?.requestId);
  await failure(kakeya.HistoryLengthMismatch, session.fork({ expectedHistoryLength: 3 }));
  expect(server.requests.length).toBe(3);
});

test("a stopped Generate that is not the history's end any more is not begun anew", async () => {
  let calls = 0;
  const session = await (
    await serve({
      // eslint-disable-next-line @typescript-eslint/require-await -- a server's stream is one
      async *generate() {
        calls += 1;
        // It had generated tokens that this client has not received, and then something else went behind them.
        if (calls === 2) throw mismatch(9n, 3n);
        server.cut();
      },
    })
  ).createSession();
  await failure(kakeya.HistoryLengthMismatch, session.generate(4).result());
  expect(calls).toBe(2);
});

test("an append is unresolved where the server knows no ids and the length does not show it", async () => {
  const session = await (await serve(history(["lost"], { knowsIds: false, ids: 3 }))).createSession();
  const error = await failure(kakeya.AppendUnresolved, session.append([7, 8]));
  expect(error.cause).toBeInstanceOf(kakeya.HistoryLengthMismatch);
  expect([error.appendedTokens, error.historyLength, error.pendingTokens]).toEqual([null, 0, 2]);
});

test("an append without an answer is unresolved, and the error says of what", async () => {
  const session = await (await serve(history(["gone"], { knowsIds: true }))).createSession();
  const error = await failure(kakeya.AppendUnresolved, session.append([7, 8]));
  expect(error.cause).toBeInstanceOf(kakeya.ConnectionFailed);
  expect([error.appendedTokens, error.historyLength, error.pendingTokens]).toEqual([null, 0, 2]);
  expect(error.message).toContain("it is unknown whether 2 ids for position 0 arrived");
  expect(error.message).toContain("The next append insists on a history of 0 tokens");
});

test("an append whose time is up is resolved by its id where others have appended meanwhile", async () => {
  let calls = 0;
  let length = 0n;
  const session = await (
    await serve({
      getSessionInfo: () => ({ historyLength: length }),
      appendTokens: ({ tokenIds }) => {
        calls += 1;
        if (calls > 1) return { historyLength: 2n, replayed: true };
        length = BigInt(tokenIds.length) + 5n;
        return new Promise<never>(() => undefined);
      },
    })
  ).createSession();
  expect(await session.append([7, 8], { timeoutSeconds: 0.1 })).toBe(2);
  expect(calls).toBe(2);
});

test.each(["under way", "waited for"] as const)(
  "an append that is %s when its client is closed does not claim that nothing arrived",
  async (when) => {
    const session = await (
      await serve(
        {
          appendTokens: () => {
            if (when === "waited for") {
              setTimeout(() => void client.close(), 50);
              server.cut();
            } else setTimeout(() => void client.close(), 5);
            return new Promise<never>(() => undefined);
          },
        },
        when === "waited for" ? { firstDelaySeconds: 60, maxDelaySeconds: 60 } : QUICK,
      )
    ).createSession();
    const error = await failure(kakeya.StateError, session.append([7, 8], { timeoutSeconds: null }));
    expect([error.appendedTokens, error.message]).toEqual([null, expect.stringContaining("was closed while")]);
  },
);

/** Of another session's, and fails if it is asked again and again. */
class OtherMismatch extends kakeya.HistoryLengthMismatch {
  #asked = 0;

  override get actual(): number | undefined {
    this.#asked += 1;
    if (this.#asked > 100) throw new Error("taken for an answer over and over");
    return 7;
  }
}

test.each<[string, kakeya.KakeyaError]>([
  ["HISTORY_LENGTH_MISMATCH", new OtherMismatch("of another session", { code: "ABORTED" })],
  ["OVERLOADED", new kakeya.Overloaded("of another session", { code: "RESOURCE_EXHAUSTED", reason: "OVERLOADED" })],
])("an append aborted with another session's %s throws it, and its fate stays open", async (_, reason) => {
  const abort = new AbortController();
  let length = 0n;
  const session = await (
    await serve({
      appendTokens: ({ tokenIds, expectedHistoryLength }) => {
        if (expectedHistoryLength !== length) throw mismatch(length);
        length += BigInt(tokenIds.length);
        if (abort.signal.aborted) return { historyLength: length };
        abort.abort(reason);
        return new Promise<never>(() => undefined);
      },
    })
  ).createSession();
  expect(await failure(kakeya.KakeyaError, session.append([7, 8], { signal: abort.signal }))).toBe(reason);
  expect(reason.appendedTokens).toBeUndefined();
  // The ids have arrived, which this side cannot know: the next append insists on the length known before.
  expect((await failure(kakeya.HistoryLengthMismatch, session.append([9]))).actual).toBe(2);
  expect(length).toBe(2n);
});

test("a close aborted with another session's SESSION_NOT_FOUND has not closed this one", async () => {
  const reason = new kakeya.SessionNotFound("another", { code: "NOT_FOUND", reason: "SESSION_NOT_FOUND" });
  const abort = new AbortController();
  let calls = 0;
  const session = await (
    await serve({
      closeSession: () => {
        calls += 1;
        if (calls === 1) server.cut();
        else abort.abort(reason);
        return new Promise<never>(() => undefined);
      },
    })
  ).createSession();
  expect(await failure(kakeya.SessionNotFound, session.close({ signal: abort.signal }))).toBe(reason);
  expect([calls, session.isClosed]).toEqual([2, false]);
});

test.each([
  [Code.ResourceExhausted, "SERVER: Received message larger than max (5 vs. 4)", kakeya.CallerError],
  [Code.ResourceExhausted, "message size 5 is larger than configured readMaxBytes 4", kakeya.CallerError],
  [Code.ResourceExhausted, "gRPC message exceeds maximum size 4: 5", kakeya.CallerError],
  [Code.ResourceExhausted, "the message has 5 bytes; this method takes 4 at most", kakeya.CallerError],
  [Code.Internal, "Exception deserializing request!", kakeya.CallerError],
  [Code.Internal, "Exception serializing response!", kakeya.ServerError],
])("what fails alike each time is sent once: %i %s", async (code, message, kind) => {
  let calls = 0;
  const session = await (
    await serve({
      getSessionInfo: () => {
        calls += 1;
        throw new ConnectError(message, code);
      },
    })
  ).createSession();
  const error = await failure(kind, session.info());
  expect(error.message).toContain(message);
  expect(calls).toBe(1);
});
