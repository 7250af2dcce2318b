/** Where the server is and how to reach it: target, TLS, key, and one HTTP/2 connection. */
import { readFileSync } from "node:fs";
import type { ClientHttp2Stream, Http2Session, SecureClientSessionOptions } from "node:http2";
import { createSecureContext } from "node:tls";

import { createClient, type Client as ConnectClient, type Interceptor } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";

import { invalid, shown } from "./checks.js";
import type { InvalidArgument } from "./errors.js";
import { known, type Pem, type TLS } from "./options.js";
import { RuntimeService } from "./generated/kakeya/v1/runtime_pb.js";

/** The calls of the wire contract. */
export type Rpc = ConnectClient<typeof RuntimeService>;

/** A connection that is made by the first call. */
export interface Channel {
  readonly rpc: Rpc;
  /** End the connection and everything on it. */
  readonly close: () => void;
}

// A connection that is dead is found out within a call's default timeout, with time to make another. The server lets
// clients ping once in 2 s.
const KEEPALIVE_SECONDS = 10;
const KEEPALIVE_ANSWER_SECONDS = 10;
// The largest reply is a few kilobytes; appends are cut to what the server says it takes.
const MAX_REPLY_BYTES = 4 * 2 ** 20;
const MAX_REQUEST_BYTES = 2 ** 31 - 1;

const TARGET = /^(?:\[(?<v6>[0-9a-fA-F:.]+)\]|(?<host>[A-Za-z0-9._-]+)):(?<port>\d{1,5})$/;
// As `new URL` spells them. What is sent to an unspecified address stays on this machine, too.
const LOOPBACK = /^(?:localhost|127(?:\.\d{1,3}){3}|0\.0\.0\.0|\[::1?\]|\[::ffff:(?:7f[\da-f]{2}:[\da-f]{1,4}|0:0)\])$/;

/**
 * Check the pieces and read certificate files. Throws InvalidArgument; a file that cannot be read throws Node's error.
 *
 * A key would cross an unencrypted connection in the clear, so it is refused for a target beyond this machine.
 */
export function openChannel(target: string, apiKey: string | undefined, tls: TLS | boolean): Channel {
  const parts = typeof target === "string" ? TARGET.exec(target)?.groups : undefined;
  if (parts === undefined || Number(parts["port"]) > 65_535 || !URL.canParse(`http://${target}`)) {
    throw invalid("target", `must be host and port alone, such as "127.0.0.1:50051", got ${shown(target)}`);
  }
  const { hostname } = new URL(`http://${target}`);
  const own = hostname.replace(/\.$/, "");
  const isLoopback = LOOPBACK.test(own);
  if (apiKey !== undefined) {
    // What HTTP/2 lets into a header.
    if (typeof apiKey !== "string" || !/^[\x20-\x7e]+$/.test(apiKey)) {
      throw invalid("apiKey", `must be a text of printable ASCII characters${spaces(apiKey)}`);
    }
    if (tls === false && !isLoopback) {
      throw invalid("apiKey", `would travel to ${target} unencrypted; pass tls: true or certificates as well`);
    }
  }
  // A name of this machine that ends with a dot would be asked of a name server.
  const authority = isLoopback ? `${own}:${parts["port"] ?? ""}` : target;
  const baseUrl = `${tls === false ? "http" : "https"}://${authority}`;
  const connection = new Connections(
    baseUrl,
    { pingIntervalMs: KEEPALIVE_SECONDS * 1000, pingTimeoutMs: KEEPALIVE_ANSWER_SECONDS * 1000 },
    tls === false ? {} : secureOptions(tls === true ? {} : tls),
  );
  const transport = createGrpcTransport({
    baseUrl,
    sessionManager: connection,
    interceptors: apiKey === undefined ? [] : [withKey(apiKey)],
    acceptCompression: [],
    readMaxBytes: MAX_REPLY_BYTES,
    writeMaxBytes: MAX_REQUEST_BYTES,
  });
  return {
    rpc: createClient(RuntimeService, transport),
    close: () => {
      connection.abort();
    },
  };
}

/**
 * Connect's, but for errors of a connection that it has left already: a call that comes between the destruction of a dead
 * connection and its error takes Connect's listener away, and an error without a listener ends the process. Calls
 * receive it by themselves.
 */
class Connections extends Http2SessionManager {
  readonly #listened = new WeakSet<Http2Session>();

  override async request(...call: Parameters<Http2SessionManager["request"]>): Promise<ClientHttp2Stream> {
    const stream = await super.request(...call);
    const { session } = stream;
    if (session !== undefined && !this.#listened.has(session)) {
      this.#listened.add(session);
      session.on("error", () => undefined);
    }
    return stream;
  }
}

/** What is wrong with a key that was read from a file as it is; of the key itself nothing is said. */
function spaces(apiKey: unknown): string {
  if (typeof apiKey !== "string" || apiKey === apiKey.trim() || apiKey.trim() === "") return "";
  return "; it begins or ends with a blank or a line break: apiKey.trim() is without";
}

function withKey(apiKey: string): Interceptor {
  return (next) => (request) => {
    request.header.set("authorization", `Bearer ${apiKey}`);
    return next(request);
  };
}

function secureOptions(tls: TLS): SecureClientSessionOptions {
  known(tls, "TLS");
  if ((tls.certificate === undefined) !== (tls.key === undefined)) {
    throw invalid("tls", "needs certificate and key together; only one of them is given");
  }
  const options = {
    ...(tls.rootCertificates === undefined ? {} : { ca: pemOf(tls.rootCertificates) }),
    ...(tls.certificate === undefined ? {} : { cert: pemOf(tls.certificate) }),
    ...(tls.key === undefined ? {} : { key: pemOf(tls.key) }),
  };
  // Node takes authorities that are none for none at all, and reports the others with the first call, as a connection
  // that failed.
  if (options.ca?.includes("-----BEGIN ") === false) throw unusable("rootCertificates has no certificate");
  try {
    createSecureContext(options);
  } catch (error) {
    throw unusable(error instanceof Error ? error.message : String(error));
  }
  return options;
}

function unusable(why: string): InvalidArgument {
  return invalid("tls", `its certificates or key cannot be used (${why}); each is PEM text, or the path of its file`);
}

function pemOf(source: Pem): Buffer {
  return typeof source === "string" ? readFileSync(source) : Buffer.from(source);
}
