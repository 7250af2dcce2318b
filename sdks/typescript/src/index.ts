/// <reference lib="esnext.disposable" preserve="true" />
/**
 * The TypeScript SDK of the Kakeya runtime: sessions with one model, over gRPC, in raw token ids.
 *
 *     import { Client } from "@kakeya/runtime";
 *
 *     await using client = new Client("127.0.0.1:50051");
 *     await using session = await client.createSession({ strategy: { kind: "sink_window", window: 1024 } });
 *     await session.append(promptTokenIds);
 *     for await (const tokenId of session.generate(256)) …
 */
export type { TokenIds } from "./checks.js";
export { Client } from "./client.js";
export type { Choice, Constraint, JsonSchema, Lark, Regex } from "./constraints.js";
export {
  AppendTooLarge,
  AppendUnresolved,
  CallerError,
  ConnectionFailed,
  ConstraintFailed,
  ConstraintUnavailable,
  DeadlineExceeded,
  Draining,
  EngineStalled,
  HistoryBehindClient,
  HistoryCorrupt,
  HistoryLengthMismatch,
  HistoryLimit,
  InternalError,
  InvalidArgument,
  InvalidConstraint,
  InvalidMessages,
  InvalidTool,
  InvalidTokenIds,
  InvariantViolated,
  JournalAway,
  JournalFull,
  KakeyaError,
  ModelMismatch,
  NoCapacity,
  NonFiniteLogits,
  OutOfMemory,
  Overloaded,
  ProtocolError,
  QuotaExceeded,
  RequestIdReused,
  RestorationFailed,
  RetryableError,
  ServerError,
  SessionBusy,
  SessionClosed,
  SessionElsewhere,
  SessionEvicted,
  SessionNotFound,
  SlowConsumer,
  StateError,
  StreamTakenOver,
  TemplateError,
  TLSFailed,
  TokenizerError,
  ToolCallError,
  ToolFormatUnknown,
  TokenOutOfRange,
  TransportError,
  Unauthenticated,
} from "./errors.js";
export type { ErrorFacts } from "./errors.js";
export type {
  AppendOptions,
  CallOptions,
  ClientOptions,
  CreateSessionOptions,
  ForkOptions,
  GenerateOptions,
  HistoryOptions,
  PrefillOptions,
  Pem,
  RewindOptions,
  SessionsOptions,
  Signal,
  TextOptions,
  ThinkingOptions,
  TLS,
} from "./options.js";
export type { RetryPolicy } from "./retry.js";
export { Session } from "./session.js";
export type {
  Coding,
  Full,
  Gather,
  LayerWindow,
  Mac,
  Named,
  Restored,
  SinkWindow,
  Strategy,
  Tiered,
} from "./strategies.js";
export { GenerateStream } from "./stream.js";
export { TextStream, type TextResult } from "./text.js";
export type { Thought } from "./thinking.js";
export type {
  Durability,
  GenerateResult,
  HistoryPiece,
  Mode,
  Progress,
  ServerInfo,
  SessionInfo,
  SessionSummary,
  StopReason,
  TokenDetail,
  TopLogprob,
  Usage,
} from "./values.js";
