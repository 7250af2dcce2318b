/**
 * Every error the SDK raises on purpose. The second level says whose turn it is.
 *
 *     KakeyaError
 *     ├── CallerError                 yours to fix; the same call fails again
 *     │   ├── InvalidArgument         ── TokenOutOfRange, InvalidTokenIds, InvalidConstraint, RequestIdReused
 *     │   ├── SessionNotFound         ── SessionEvicted
 *     │   ├── SessionClosed, HistoryLengthMismatch, HistoryLimit, AppendTooLarge
 *     │   ├── ConstraintUnavailable, ConstraintFailed
 *     │   ├── SlowConsumer, StreamTakenOver, Unauthenticated
 *     │   ├── StateError              a client, session or stream used out of order
 *     │   ├── InvalidMessages, TemplateError, TokenizerError     from @kakeya/runtime/tokenization
 *     │   └── InvalidTool, ToolFormatUnknown, ToolCallError      from @kakeya/runtime/tools
 *     ├── RetryableError              wait (`retryAfterSeconds`) and try again
 *     │   ├── SessionBusy, NoCapacity, OutOfMemory, Overloaded, QuotaExceeded, Draining, EngineStalled
 *     │   └── JournalFull, JournalAway, SessionElsewhere
 *     ├── ServerError                 the server's fault
 *     │   ├── InvariantViolated, NonFiniteLogits, RestorationFailed, InternalError, ProtocolError
 *     │   └── HistoryBehindClient, HistoryCorrupt, ModelMismatch
 *     ├── DeadlineExceeded            the call took longer than its timeout
 *     └── TransportError              the network or a proxy, not the runtime
 *         ├── ConnectionFailed        ── TLSFailed
 *         └── AppendUnresolved        it is unknown whether ids of an append arrived
 *
 * An error the server explains is chosen by its ErrorInfo reason; a reason newer than this SDK, by its status code.
 */

/** What is known of an error beside its message. */
export interface ErrorFacts {
  readonly code?: string | undefined;
  readonly reason?: string | undefined;
  readonly metadata?: Readonly<Record<string, string>> | undefined;
  readonly retryAfterSeconds?: number | undefined;
  readonly cause?: unknown;
}

/** Base of all errors of the SDK. `name` is the class's own. */
export class KakeyaError extends Error {
  /** The gRPC status name, such as `"NOT_FOUND"`; undefined for an error found on this side of the wire. */
  readonly code: string | undefined;
  /** The runtime's word for the situation; undefined where it gave none. */
  readonly reason: string | undefined;
  /** The facts of the situation, as the runtime reports them. */
  readonly metadata: Readonly<Record<string, string>>;
  /** The wait the server asked for, if it did. */
  readonly retryAfterSeconds: number | undefined;
  /** Set by a failed `append`: how many of its ids are in the history; null if that cannot be known. */
  appendedTokens: number | null | undefined = undefined;
  /**
   * False: the call never left this side, or the server did not process it.
   *
   * @internal
   */
  wasSent = true;
  /**
   * The connection had as many calls as the server takes on one.
   *
   * @internal
   */
  isFull = false;

  constructor(message: string, facts: ErrorFacts = {}) {
    super(message, facts.cause === undefined ? undefined : { cause: facts.cause });
    this.name = NAMES.get(new.target) ?? new.target.name;
    this.code = facts.code;
    this.reason = facts.reason;
    this.metadata = { ...facts.metadata };
    this.retryAfterSeconds = facts.retryAfterSeconds;
  }

  /** @internal */
  protected numberOf(key: string): number | undefined {
    const value = this.metadata[key] ?? "";
    return /^\d+$/.test(value) ? Number(value) : undefined;
  }
}

/** The request is at fault, or the caller's picture of the session. Repeating it unchanged fails again. */
export class CallerError extends KakeyaError {}

/** An argument is out of its documented range. `field` is its name in the wire contract. */
export class InvalidArgument extends CallerError {
  get field(): string | undefined {
    return this.metadata["field"];
  }
}

/** An id is not in the model's vocabulary. Nothing was appended. */
export class TokenOutOfRange extends InvalidArgument {}

/** Something that is not a token id, found before anything was sent. `index` and `value` say where and what. */
export class InvalidTokenIds extends InvalidArgument {
  readonly index: number | undefined;
  readonly value: unknown;

  constructor(message: string, at: { field: string; index: number | undefined; value: unknown }) {
    super(message, { metadata: { field: at.field } });
    this.index = at.index;
    this.value = at.value;
  }
}

/** The constraint cannot be compiled, permits nothing, or takes more work than the server allows. */
export class InvalidConstraint extends InvalidArgument {}

/** A request id was used before, for another request. The SDK makes up its own, so this is a fault of the SDK's. */
export class RequestIdReused extends InvalidArgument {}

/** The session is unknown, closed, or belongs to another owner. */
export class SessionNotFound extends CallerError {}

/** The server took the session away; create a new one and append its history. `evictionCause` says why. */
export class SessionEvicted extends SessionNotFound {
  get evictionCause(): string {
    return this.metadata["cause"] ?? "";
  }
}

/** The session was closed, on this side or while the call was running. */
export class SessionClosed extends CallerError {}

/** The history is not as long as expected; the call changed nothing. */
export class HistoryLengthMismatch extends CallerError {
  get expected(): number | undefined {
    return this.numberOf("expected");
  }

  get actual(): number | undefined {
    return this.numberOf("actual");
  }
}

/** The append would exceed the session's length limit; nothing of this call's last request was appended. */
export class HistoryLimit extends CallerError {
  get historyLength(): number | undefined {
    return this.numberOf("history_length");
  }

  get limitTokens(): number | undefined {
    return this.numberOf("limit_tokens");
  }
}

/** More ids in one request than the server takes. `Session.append` splits, so this means its limit just changed. */
export class AppendTooLarge extends CallerError {
  get maxAppendTokens(): number | undefined {
    return this.numberOf("max_append_tokens");
  }
}

/** The server does not know the bytes of its model's tokens, which all constraints but a choice need. */
export class ConstraintUnavailable extends CallerError {}

/** The constraint allows no token at `position`; the tokens before are in the history. */
export class ConstraintFailed extends CallerError {
  get position(): number | undefined {
    return this.numberOf("position");
  }
}

/** The stream was not read for so long that the server stopped generating. The session is kept. */
export class SlowConsumer extends CallerError {
  get position(): number | undefined {
    return this.numberOf("position");
  }
}

/** Another call attached to this Generate and reads it now. */
export class StreamTakenOver extends CallerError {
  get position(): number | undefined {
    return this.numberOf("position");
  }
}

/** The API key is missing or wrong. */
export class Unauthenticated extends CallerError {}

/** A client, session or stream was used in an order that makes no sense; the message says which. */
export class StateError extends CallerError {}

/** Chat messages that cannot be rendered. `path` points at the culprit, such as `messages[2].content[0]`. */
export class InvalidMessages extends CallerError {
  readonly path: string;

  constructor(path: string, problem: string) {
    super(`${path}: ${problem}`);
    this.path = path;
  }
}

/** The tokenizer's chat template cannot be used as was asked. */
export class TemplateError extends CallerError {}

/** The tokenizer cannot be found or loaded, or is not the served model's. */
export class TokenizerError extends CallerError {}

/** A tool that has no valid name or schema. `path` is the invalid part, such as `add.parameters.a`. */
export class InvalidTool extends CallerError {
  readonly path: string;

  constructor(path: string, problem: string) {
    super(`${path}: ${problem}`);
    this.path = path;
  }
}

/** The chat template writes no tool calls that can be read again; name a format. */
export class ToolFormatUnknown extends TemplateError {}

/**
 * What the model wrote is no whole tool call. `text` is what it wrote of it, `parts` what was read before it and not given
 * out yet.
 */
export class ToolCallError extends CallerError {
  readonly text: string;
  parts: readonly unknown[] = [];

  constructor(message: string, text: string) {
    super(message);
    this.text = text;
  }
}

/** Nothing was changed; the same call can succeed later. */
export class RetryableError extends KakeyaError {}

/** Another operation is running on the session, and did not end while the server waited. */
export class SessionBusy extends RetryableError {}

/** The server has no room for the session's reservation now. */
export class NoCapacity extends RetryableError {}

/** The server's queue is full. */
export class Overloaded extends RetryableError {}

/**
 * The caller has as many sessions, bytes of K/V, tokens of history or waiting Generates as the server lets one have;
 * `quota` says which. Waiting helps where `retryAfterSeconds` is there; else close sessions.
 */
export class QuotaExceeded extends RetryableError {
  get quota(): string | undefined {
    return this.metadata["quota"];
  }
}

/** The server is shutting down. */
export class Draining extends RetryableError {}

/** The server's engine has stalled. It may recover; if not, the server ends. */
export class EngineStalled extends RetryableError {}

/** The device ran out of memory during the call. The session and its history are kept. */
export class OutOfMemory extends RetryableError {}

/**
 * The disk that the server keeps sessions on is full. Nothing was lost, and this call changed nothing.
 *
 * Sessions can be read, and closed: that makes room for others.
 */
export class JournalFull extends RetryableError {}

/**
 * What the server keeps sessions in cannot be reached for now; nothing that it had answered is lost.
 *
 * `isPending`: whether this call counts is open until then, and the same call again does nothing twice; else it changed
 * nothing.
 */
export class JournalAway extends RetryableError {
  get isPending(): boolean {
    return this.metadata["pending"] === "true";
  }
}

/**
 * Another server has the session, and lets go of it: the same call again finds it.
 *
 * `isPending`: the call was done where it was, and whether it counts is open; the same call again does nothing twice.
 * Else it changed nothing.
 */
export class SessionElsewhere extends RetryableError {
  get isPending(): boolean {
    return this.metadata["pending"] === "true";
  }
}

/** The server is at fault. */
export class ServerError extends KakeyaError {}

/** The session's cache and history disagreed; it is failed, create a new one. `kind` is INV1, INV2 or INV3. */
export class InvariantViolated extends ServerError {
  get kind(): string {
    return this.reason ?? "";
  }
}

/** The model produced NaN or infinity; nothing was sampled. */
export class NonFiniteLogits extends ServerError {}

/** KV entries outside the exact window could not be restored; the history is kept. */
export class RestorationFailed extends ServerError {}

/** The history has `actual` tokens, and this side was given tokens up to `expected`: the server lost some. */
export class HistoryBehindClient extends ServerError {
  get expected(): number | undefined {
    return this.numberOf("expected");
  }

  get actual(): number | undefined {
    return this.numberOf("actual");
  }
}

/** What the server keeps of this session on disk is damaged; other sessions are not concerned. */
export class HistoryCorrupt extends ServerError {}

/** The session was made under a model or settings that the server does not run now; it is kept until it does. */
export class ModelMismatch extends ServerError {}

/** A bug of the server. `incident` finds it in the server's log. */
export class InternalError extends ServerError {
  get incident(): string {
    return this.metadata["incident"] ?? "";
  }
}

/** The server's answer breaks the wire contract. */
export class ProtocolError extends ServerError {}

/** The call took longer than its timeout. The session and everything committed are kept. */
export class DeadlineExceeded extends KakeyaError {}

/** The call failed outside the runtime: no explanation of the runtime's came with it. */
export class TransportError extends KakeyaError {}

/** The server could not be reached, or the connection broke. */
export class ConnectionFailed extends TransportError {}

/** A certificate is not accepted, or only one side speaks TLS. The same call fails again, so it is not retried. */
export class TLSFailed extends ConnectionFailed {}

/**
 * It is unknown whether ids of an append are in the history; `cause` is the error.
 *
 * `pendingTokens` ids were to follow the first `historyLength` tokens of the history. Whatever became of them, the
 * session's next append does not double them: it insists on the length known before.
 */
export class AppendUnresolved extends TransportError {
  readonly historyLength: number;
  readonly pendingTokens: number;

  constructor(cause: KakeyaError, at: { historyLength: number; pendingTokens: number }) {
    super(
      `${cause.message}; it is unknown whether ${at.pendingTokens} ids for position ${at.historyLength} arrived. ` +
        `The next append insists on a history of ${at.historyLength} tokens: if they arrived, it is refused with ` +
        "HistoryLengthMismatch, whose `actual` is the length, and the one after that goes there. info() returns the " +
        "length, too",
      {
        code: cause.code,
        reason: cause.reason,
        metadata: cause.metadata,
        retryAfterSeconds: cause.retryAfterSeconds,
        cause,
      },
    );
    this.historyLength = at.historyLength;
    this.pendingTokens = at.pendingTokens;
  }
}

// Bundlers that shorten code give classes other names, and leave those of properties.
const NAMES = new Map<unknown, string>(
  Object.entries({
    KakeyaError,
    CallerError,
    InvalidArgument,
    TokenOutOfRange,
    InvalidTokenIds,
    InvalidConstraint,
    RequestIdReused,
    SessionNotFound,
    SessionEvicted,
    SessionClosed,
    HistoryLengthMismatch,
    HistoryLimit,
    AppendTooLarge,
    ConstraintUnavailable,
    ConstraintFailed,
    SlowConsumer,
    StreamTakenOver,
    Unauthenticated,
    StateError,
    InvalidMessages,
    TemplateError,
    TokenizerError,
    InvalidTool,
    ToolFormatUnknown,
    ToolCallError,
    RetryableError,
    SessionBusy,
    NoCapacity,
    Overloaded,
    QuotaExceeded,
    Draining,
    EngineStalled,
    OutOfMemory,
    JournalFull,
    JournalAway,
    SessionElsewhere,
    ServerError,
    InvariantViolated,
    NonFiniteLogits,
    RestorationFailed,
    HistoryBehindClient,
    HistoryCorrupt,
    ModelMismatch,
    InternalError,
    ProtocolError,
    DeadlineExceeded,
    TransportError,
    ConnectionFailed,
    TLSFailed,
    AppendUnresolved,
  }).map(([name, kind]) => [kind, name]),
);
