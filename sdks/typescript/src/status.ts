/** From a failed call to one of our errors: by ErrorInfo reason, else by status code. */
import { Code, ConnectError } from "@connectrpc/connect";

import * as errors from "./errors.js";
import { ErrorInfoSchema, RetryInfoSchema } from "./generated/google/rpc/error_details_pb.js";

const DOMAIN = "kakeya.v1";

// OpenSSL's words for what is wrong with a certificate, as Node names them.
const CERTIFICATE_CODES =
  /^(?:UNABLE_TO_|SELF_SIGNED|DEPTH_ZERO|CERT_|CRL_|ERROR_IN_CERT|INVALID_CA|INVALID_PURPOSE|PATH_LENGTH|HOSTNAME_MIS)/;

type ErrorClass = new (message: string, facts: errors.ErrorFacts) => errors.KakeyaError;

/** Every reason of the runtime's, with its class. */
export const CLASS_BY_REASON: Readonly<Record<string, ErrorClass>> = {
  INVALID_ARGUMENT: errors.InvalidArgument,
  TOKEN_OUT_OF_RANGE: errors.TokenOutOfRange,
  INVALID_CONSTRAINT: errors.InvalidConstraint,
  CONSTRAINT_UNAVAILABLE: errors.ConstraintUnavailable,
  CONSTRAINT_FAILED: errors.ConstraintFailed,
  REQUEST_ID_REUSED: errors.RequestIdReused,
  SESSION_NOT_FOUND: errors.SessionNotFound,
  SESSION_EVICTED: errors.SessionEvicted,
  SESSION_CLOSED: errors.SessionClosed,
  HISTORY_LENGTH_MISMATCH: errors.HistoryLengthMismatch,
  HISTORY_BEHIND_CLIENT: errors.HistoryBehindClient,
  HISTORY_LIMIT: errors.HistoryLimit,
  APPEND_TOO_LARGE: errors.AppendTooLarge,
  SLOW_CONSUMER: errors.SlowConsumer,
  STREAM_TAKEN_OVER: errors.StreamTakenOver,
  UNAUTHENTICATED: errors.Unauthenticated,
  SESSION_BUSY: errors.SessionBusy,
  NO_CAPACITY: errors.NoCapacity,
  OVERLOADED: errors.Overloaded,
  QUOTA: errors.QuotaExceeded,
  DRAINING: errors.Draining,
  ENGINE_STALLED: errors.EngineStalled,
  JOURNAL_FULL: errors.JournalFull,
  JOURNAL_AWAY: errors.JournalAway,
  SESSION_ELSEWHERE: errors.SessionElsewhere,
  OUT_OF_MEMORY: errors.OutOfMemory,
  INV1: errors.InvariantViolated,
  INV2: errors.InvariantViolated,
  INV3: errors.InvariantViolated,
  NON_FINITE_LOGITS: errors.NonFiniteLogits,
  RESTORATION_FAILED: errors.RestorationFailed,
  HISTORY_CORRUPT: errors.HistoryCorrupt,
  MODEL_MISMATCH: errors.ModelMismatch,
  INTERNAL: errors.InternalError,
  DEADLINE: errors.DeadlineExceeded,
};

// A reason this SDK does not know yet still says, by its code, whose turn it is.
const CLASS_BY_CODE = new Map<Code, ErrorClass>([
  [Code.Aborted, errors.RetryableError],
  [Code.ResourceExhausted, errors.RetryableError],
  [Code.Unavailable, errors.RetryableError],
  [Code.Internal, errors.ServerError],
  [Code.Unknown, errors.ServerError],
  [Code.DataLoss, errors.ServerError],
  [Code.InvalidArgument, errors.InvalidArgument],
  [Code.DeadlineExceeded, errors.DeadlineExceeded],
  [Code.Canceled, errors.TransportError],
]);

// What Connect calls a call whose connection went away: it depends on where in the call that happened.
const CODES_OF_A_LOST_CONNECTION = new Set([
  Code.Aborted,
  Code.Canceled,
  Code.Internal,
  Code.Unavailable,
  Code.Unknown,
]);

const NEVER_REACHED =
  "; this client has not reached it yet: check host and port, and that a server runs there (kakeya serve)";

// Node's word for an answer that is no HTTP/2.
const NO_HTTP2 = "Protocol error";
const HTTP1 =
  "what answers there speaks no gRPC; give the address at which `kakeya serve` says that it is ready, not its port for " +
  "chat completions or metrics";

// HTTP/2's word for it (RFC 9113, section 8.7): the server did not process the call, it may be retried.
const REFUSED_STREAM = "REFUSED_STREAM";

// What fails alike each time, in the words of gRPC's cores, its Go and Java, of Connect, and of our server.
const FINAL: readonly [Code, RegExp, ErrorClass, string][] = [
  [
    Code.ResourceExhausted,
    /larger than (?:max|configured)|exceeds maximum size|this method takes/,
    errors.CallerError,
    "the message is too large for",
  ],
  [
    Code.Internal,
    /^Exception (?:de)?serializing request|^serialize binary/,
    errors.CallerError,
    "the request is no message for",
  ],
  [
    Code.Internal,
    /^Exception (?:de)?serializing response|^parse binary/,
    errors.ServerError,
    "the answer cannot be read, from",
  ],
];

/**
 * The typed error for a failed call. `isLate`: its deadline has passed; `isReached`: the client has reached this target
 * before. Never throws.
 */
export function fromConnectError(
  error: ConnectError,
  target: string,
  { isLate = false, isReached = true }: { readonly isLate?: boolean; readonly isReached?: boolean } = {},
): errors.KakeyaError {
  const explanation = explained(error);
  if (explanation !== undefined) return explanation;
  const connecting = causeWithCode(error);
  const problem = connecting === undefined ? undefined : tlsProblem(connecting);
  if (problem !== undefined && !isLate) {
    const failure = new errors.TLSFailed(`no connection to ${target}: ${problem}`, {
      code: "UNAVAILABLE",
      cause: error,
    });
    failure.wasSent = false;
    return failure;
  }
  if (!isLate && error.rawMessage.includes(REFUSED_STREAM)) {
    const failure = new errors.ConnectionFailed(
      `${target} takes no more calls on this connection than there are; end some, or open another client`,
      { code: "UNAVAILABLE", cause: error },
    );
    failure.isFull = true;
    failure.wasSent = false;
    return failure;
  }
  const final = FINAL.find(([code, sign]) => !isLate && error.code === code && sign.test(error.rawMessage));
  if (final !== undefined) {
    const [code, , kind, situation] = final;
    return new kind(`${situation} ${target}: ${error.rawMessage}`, { code: nameOf(code), cause: error });
  }
  const [kind, code, situation] = unexplained(error, target, isLate);
  const wasSent = !(connecting?.syscall === "connect" || connecting?.syscall === "getaddrinfo");
  const advice = isReached || wasSent ? "" : NEVER_REACHED;
  const isHttp1 = !isReached && kind === errors.ConnectionFailed && error.rawMessage.includes(NO_HTTP2);
  const said = isHttp1 ? HTTP1 : `${error.rawMessage}${advice}`;
  const failure = new kind(`${situation}: ${said}`, { code, cause: error });
  failure.wasSent = wasSent;
  return failure;
}

/** Node's own error behind a call's. */
function causeWithCode(error: unknown): NodeJS.ErrnoException | undefined {
  for (let cause = error; cause instanceof Error; cause = cause.cause) {
    if ("code" in cause && typeof cause.code === "string") return cause as NodeJS.ErrnoException;
  }
  return undefined;
}

/** What is wrong with keys and certificates; undefined if nothing of that kind is. */
function tlsProblem({ code = "", message }: NodeJS.ErrnoException): string | undefined {
  if (code === "ERR_TLS_CERT_ALTNAME_INVALID") return `its certificate is for another name: ${message.trim()}`;
  if (CERTIFICATE_CODES.test(code)) {
    return `its certificate is not accepted: ${message}; tls: { rootCertificates } names its authority`;
  }
  if (/wrong.version.number|packet.length.too.long/i.test(`${code} ${message}`)) {
    return "it does not speak TLS; leave out tls, or ask for a port that does";
  }
  if (/certificate.required/i.test(`${code} ${message}`)) {
    return "it asks its clients for a certificate; tls: { certificate, key } gives one";
  }
  return code.startsWith("ERR_SSL_") ? message.trim() : undefined;
}

function explained(error: ConnectError): errors.KakeyaError | undefined {
  const info = error.findDetails(ErrorInfoSchema).find((each) => each.domain === DOMAIN);
  // A status that contradicts itself explains nothing.
  if (info === undefined || error.metadata.get("grpc-status") !== String(error.code)) return undefined;
  const delay = error.findDetails(RetryInfoSchema)[0]?.retryDelay;
  const kind = ownEntry(CLASS_BY_REASON, info.reason) ?? CLASS_BY_CODE.get(error.code) ?? errors.CallerError;
  return new kind(error.rawMessage, {
    code: nameOf(error.code),
    reason: info.reason,
    metadata: info.metadata,
    retryAfterSeconds: delay === undefined ? undefined : Number(delay.seconds) + delay.nanos / 1e9,
    cause: error,
  });
}

/** Without our ErrorInfo it was gRPC itself, on either side, or something in between. */
function unexplained(error: ConnectError, target: string, isLate: boolean): [ErrorClass, string, string] {
  if (isLate || error.code === Code.DeadlineExceeded) {
    return [errors.DeadlineExceeded, "DEADLINE_EXCEEDED", `no answer from ${target} within the timeout`];
  }
  const wasAnswered = error.metadata.has("grpc-status") || error.metadata.has("content-type");
  if (error.code === Code.Unavailable || (!wasAnswered && CODES_OF_A_LOST_CONNECTION.has(error.code))) {
    return [errors.ConnectionFailed, "UNAVAILABLE", `no connection to ${target}`];
  }
  return [errors.TransportError, nameOf(error.code), `the call failed at ${target}`];
}

/** `NOT_FOUND` for Code.NotFound. */
function nameOf(code: Code): string {
  // Connect writes it with one L.
  if (code === Code.Canceled) return "CANCELLED";
  return Code[code].replace(/(?<=[a-z])[A-Z]/g, (letter) => `_${letter}`).toUpperCase();
}

function ownEntry<T>(table: Readonly<Record<string, T>>, key: string): T | undefined {
  return Object.hasOwn(table, key) ? table[key] : undefined;
}
