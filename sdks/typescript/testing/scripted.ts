/** A gRPC server that answers as each test says, for what a real one does rarely. */
import { once } from "node:events";
import { createServer, type ServerHttp2Session } from "node:http2";
import type { AddressInfo } from "node:net";

import { Code, ConnectError, type ServiceImpl } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";

import { ErrorInfoSchema, RetryInfoSchema } from "../src/generated/google/rpc/error_details_pb.js";
import { RuntimeService } from "../src/generated/kakeya/v1/runtime_pb.js";

export type Script = Partial<ServiceImpl<typeof RuntimeService>>;

export interface Scripted {
  readonly target: string;
  /** End all connections, now. */
  readonly cut: () => void;
  /** End all connections, and take no more. */
  readonly close: () => Promise<void>;
}

export async function scripted(script: Script): Promise<Scripted> {
  const sessions = new Set<ServerHttp2Session>();
  const server = createServer(
    connectNodeAdapter({ routes: (router) => router.service(RuntimeService, script), acceptCompression: [] }),
  );
  server.on("session", (session) => {
    sessions.add(session);
    session.on("close", () => sessions.delete(session));
    session.on("error", () => undefined);
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const cut = (): void => {
    for (const session of sessions) session.destroy();
  };
  return {
    target: `127.0.0.1:${(server.address() as AddressInfo).port}`,
    cut,
    close: async () => {
      server.close();
      cut();
      await once(server, "close");
    },
  };
}

/** What a server that drains answers. */
export function draining(retryAfterSeconds: number): ConnectError {
  const seconds = Math.floor(retryAfterSeconds);
  const nanos = Math.round((retryAfterSeconds - seconds) * 1e9);
  return new ConnectError("the server is shutting down", Code.Unavailable, undefined, [
    { desc: ErrorInfoSchema, value: { domain: "kakeya.v1", reason: "DRAINING" } },
    { desc: RetryInfoSchema, value: { retryDelay: { seconds: BigInt(seconds), nanos } } },
  ]);
}

/** What a server answers that cannot reach its journal. */
export function away(isPending: boolean): ConnectError {
  return new ConnectError("the journal cannot be reached", Code.Unavailable, undefined, [
    {
      desc: ErrorInfoSchema,
      value: { domain: "kakeya.v1", reason: "JOURNAL_AWAY", metadata: { pending: String(isPending) } },
    },
    { desc: RetryInfoSchema, value: { retryDelay: { seconds: 0n, nanos: 10_000_000 } } },
  ]);
}

export function elsewhere(isPending: boolean): ConnectError {
  return new ConnectError("the journal cannot be reached", Code.Unavailable, undefined, [
    {
      desc: ErrorInfoSchema,
      value: { domain: "kakeya.v1", reason: "SESSION_ELSEWHERE", metadata: { pending: String(isPending) } },
    },
    { desc: RetryInfoSchema, value: { retryDelay: { seconds: 0n, nanos: 10_000_000 } } },
  ]);
}

/** What a server answers whose history is not as long as expected. */
export function mismatch(actual: bigint, expected?: bigint): ConnectError {
  const lengths = { actual: String(actual), ...(expected === undefined ? {} : { expected: String(expected) }) };
  return new ConnectError("the history is not as long as expected", Code.Aborted, undefined, [
    {
      desc: ErrorInfoSchema,
      value: { domain: "kakeya.v1", reason: "HISTORY_LENGTH_MISMATCH", metadata: lengths },
    },
  ]);
}
