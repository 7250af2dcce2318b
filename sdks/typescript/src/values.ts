/** What the runtime reports to its callers, as plain values with the units in their names. */
import { exact } from "./checks.js";
import {
  Durability as WireDurability,
  GenerateDone_StopReason as WireStopReason,
  Mode as WireMode,
  type CreateSessionResponse,
  type ForkSessionResponse,
  type RewindSessionResponse,
  type GetServerInfoResponse,
  type GetSessionInfoResponse,
  type ReadHistoryResponse,
  type SessionSummary as WireSummary,
  type Usage as WireUsage,
} from "./generated/kakeya/v1/runtime_pb.js";
import { strategyFromWire, type Strategy } from "./strategies.js";

/**
 * Why a Generate ended. "eos": by an end id of the session's or a stop id of the request's; the id itself is emitted and
 * stays in the history. "truncated": the session's length limit was reached. "constraint": the output is whole by its constraint, and nothing may follow. "unknown": a
 * reason newer than this SDK.
 */
export type StopReason = "max_tokens" | "eos" | "cancelled" | "truncated" | "constraint" | "unknown";

/** What equal histories promise: "batched" equal up to rounding, "fixed-shape" equal to the bit. */
export type Mode = "batched" | "fixed-shape" | "unknown";

/**
 * What a session's history survives; what a client has received of it is never lost by less. "none": it ends with
 * the server's process. "process": the end of the process, however it comes. "power": a loss of power as well. "unknown":
 * a kind newer than this SDK.
 */
export type Durability = "none" | "process" | "power" | "unknown";

/**
 * How far a Generate is from its first token. `queuePosition` counts the Generates that were ahead when this one was
 * accepted; prefill then runs from 0 to `totalTokens`.
 */
export interface Progress {
  readonly queuePosition: number;
  readonly doneTokens: number;
  readonly totalTokens: number;
}

/** A token that could have come, and its natural log-probability under the raw logits. */
export interface TopLogprob {
  readonly tokenId: number;
  readonly logprob: number;
}

/** One token, its absolute position, and, if asked for, its natural log-probability under the raw logits. */
export interface TokenDetail {
  readonly tokenId: number;
  readonly position: number;
  readonly logprob: number | undefined;
  /** The likeliest tokens in its place, the likeliest first; as many as were asked for. */
  readonly topLogprobs: readonly TopLogprob[];
}

/** A finished Generate: its tokens, why it stopped, what it cost and what it could read. */
export interface GenerateResult {
  readonly tokenIds: readonly number[];
  /** One for each token; undefined unless asked for. */
  readonly logprobs: readonly number[] | undefined;
  /** A list for each token; undefined unless asked for. */
  readonly topLogprobs: readonly (readonly TopLogprob[])[] | undefined;
  readonly stopReason: StopReason;
  /** When the stream ended. */
  readonly historyLength: number;
  /** In force: the one given, or the one the server drew. All 64 bits count. */
  readonly seed: bigint;
  readonly prefillSeconds: number;
  readonly totalSeconds: number;
  readonly generatedTokens: number;
  /** History computed by this Generate. */
  readonly prefilledTokens: number;
  /** History whose K/V were there already. */
  readonly cachedTokens: number;
  /** Readable by the last token. */
  readonly attendedPositions: number;
  /** Not readable by it. */
  readonly evictedPositions: number;
  /** Of the attended ones, those it read in a coded or restored form. */
  readonly restoredPositions: number;
  /** Positions that were unreadable already at the first token. */
  readonly truncatedTokens: number;
  /** Draft tokens of the server's drafter that were verified. */
  readonly draftedTokens: number;
  /** How many of them were right. */
  readonly acceptedTokens: number;
  /** The drafter failed and was not asked again; the tokens are what they would have been. */
  readonly isDegraded: boolean;
  /** Is the output whole by its constraint? false: it was cut; undefined: it had none. */
  readonly fitsConstraint: boolean | undefined;
  /** Which of `stopSequences` ended it; undefined: none did. */
  readonly stopSequence: number | undefined;
}

/**
 * What is fixed when a session is made.
 *
 * @internal
 */
export interface SessionFacts {
  readonly id: string;
  readonly historyLength: number;
  readonly strategy: Strategy | undefined;
  readonly sustainedBytes: number;
  readonly reservedBytes: number;
  readonly peakBytes: number;
  readonly tierBytes: number;
  readonly sharedBytes: number;
  readonly prefillTokens: number | undefined;
  readonly limitTokens: number | undefined;
  readonly mode: Mode;
  readonly modelId: string;
  readonly durability: Durability;
}

/** Facts about a session at one moment. */
export interface SessionInfo {
  readonly historyLength: number;
  /** Positions with K/V, evicted ones included; the rest of the history waits for prefill. */
  readonly cachedTokens: number;
  readonly evictedTokens: number;
  /** Held now. */
  readonly kvLiveBytes: number;
  /** Held at most between Generates. */
  readonly sustainedBytes: number;
  /** Of them, reserved now; less than all: the session is granted more as it grows. */
  readonly reservedBytes: number;
  /** Held at most ever. */
  readonly peakBytes: number;
  /** Longest history the session can reach; undefined: no limit. */
  readonly limitTokens: number | undefined;
  /** undefined: of a kind newer than this SDK. */
  readonly strategy: Strategy | undefined;
  readonly isGenerating: boolean;
  readonly idleSeconds: number;
  /** Why the session failed; empty: it has not. */
  readonly failureReason: string;
  readonly inv1Violations: number;
  readonly inv2Violations: number;
  readonly inv3Violations: number;
  /** Draft tokens of the server's drafter that were verified in all Generates. */
  readonly draftedTokens: number;
  /** How many of them were right. */
  readonly acceptedTokens: number;
  /** Held off the device now, in the server's memory. */
  readonly tierLiveBytes: number;
  /** Held there at most; reserved. */
  readonly tierBytes: number;
  /** As it was given when the session was made; empty: none was. */
  readonly label: string;
  /** Of the server's memory that the token ids take, those shared with forks included. */
  readonly historyBytes: number;
  /** In the server's memory; if not, the next call that uses the session brings it back. */
  readonly isResident: boolean;
  /** Of the history that are safe by the session's durability; 0 with "none". */
  readonly savedTokens: number;
  /** Held beyond kvLiveBytes and peakBytes, until anything needs the memory. */
  readonly spareLiveBytes: number;
  /** End every Generate of the session. */
  readonly eosTokenIds: readonly number[];
}

/** One session of `Client.sessions()`, at the moment its page was read. */
export interface SessionSummary {
  readonly id: string;
  readonly label: string;
  readonly historyLength: number;
  /** Since it was made. */
  readonly ageSeconds: number;
  /** Since it was used last. */
  readonly idleSeconds: number;
  /** As in SessionInfo. */
  readonly isResident: boolean;
  readonly isGenerating: boolean;
  /** Why the session failed; empty: it has not. */
  readonly failureReason: string;
  /** undefined: of a kind newer than this SDK. */
  readonly strategy: Strategy | undefined;
}

/** Consecutive tokens of a history, and how they came. */
export interface HistoryPiece {
  readonly firstPosition: number;
  readonly tokenIds: readonly number[];
  /** So many of them were appended, then so many generated, then so many appended, and so on. The first may be 0. */
  readonly runLengths: readonly number[];
  /** Of the whole, when the piece was read. */
  readonly historyLength: number;
}

/** What Generates took that have ended, of sessions that closed, too. */
export interface Usage {
  /** History that was computed. */
  readonly prefilledTokens: number;
  /** History whose K/V were there already. */
  readonly cachedTokens: number;
  readonly generatedTokens: number;
  /** Draft tokens that were verified. */
  readonly draftedTokens: number;
  /** How many of them were accepted. */
  readonly acceptedTokens: number;
}

/** Facts about the server: its model, its limits, what it can do. */
export interface ServerInfo {
  readonly version: string;
  readonly modelId: string;
  readonly vocabSize: number;
  readonly trainedPositions: number;
  readonly device: string;
  readonly dtype: string;
  readonly mode: Mode;
  /** The kinds of strategies it takes. */
  readonly strategies: readonly string[];
  /** undefined: of a kind newer than this SDK. */
  readonly defaultStrategy: Strategy | undefined;
  readonly maxGenerateTokens: number;
  readonly maxAppendTokens: number;
  readonly maxMessageBytes: number;
  readonly kvCapacityBytes: number;
  /** By your own sessions. */
  readonly kvReservedBytes: number;
  readonly segmentTokens: number;
  readonly sessionIdleTtlSeconds: number;
  /** The drafter of Generates that allow it; empty: none. */
  readonly drafter: string;
  /** Off the device, in the server's memory or in files. */
  readonly tierCapacityBytes: number;
  /** By your own sessions. */
  readonly tierReservedBytes: number;
  /** Of a session that asks for no limit; undefined: there is none. */
  readonly defaultLimitTokens: number | undefined;
  /** Sessions that do not ask otherwise reserve all their memory at creation. */
  readonly growthGuaranteed: boolean;
  /** The longest history a session may have, whatever its own limit; 0: no limit. */
  readonly historyTokensPerSession: number;
  /** In all your sessions, what forks share counted once; 0: no limit. */
  readonly historyTokensPerOwner: number;
  /** In your sessions now, counted so. */
  readonly historyTokens: number;
  /** What runs the model: native, torch; empty: an older server. */
  readonly backend: string;
  /** The numeric identity: within one, equal histories have equal logits. */
  readonly numerics: string;
  /** Of sessions that are made now. */
  readonly durability: Durability;
  /** End a turn of the model: of sessions that name no others. */
  readonly eosTokenIds: readonly number[];
  /** What your sessions begin with is prefilled once; false: of forks alone. */
  readonly sharesPrefixes: boolean;
  /** Of closed sessions' K/V, kept for new ones while no session needs the memory. */
  readonly prefixCapacityBytes: number;
  /** Kept of your own. */
  readonly prefixBytes: number;
  /** Of your own Generates; undefined: an older server. */
  readonly usage: Usage | undefined;
  /** Of a session, whatever its strategy and its length; part of its sustained bytes. */
  readonly recurrentStateBytes: number;
}

/** @internal */
export function stopReasonOf(reason: WireStopReason): StopReason {
  switch (reason) {
    case WireStopReason.MAX_TOKENS:
      return "max_tokens";
    case WireStopReason.EOS:
      return "eos";
    case WireStopReason.CANCELLED:
      return "cancelled";
    case WireStopReason.TRUNCATED:
      return "truncated";
    case WireStopReason.CONSTRAINT:
      return "constraint";
    default:
      return "unknown";
  }
}

function modeOf(mode: WireMode): Mode {
  switch (mode) {
    case WireMode.BATCHED:
      return "batched";
    case WireMode.FIXED_SHAPE:
      return "fixed-shape";
    default:
      return "unknown";
  }
}

/** @internal */
export function createdFacts(reply: CreateSessionResponse): SessionFacts {
  return { ...sharedFacts(reply), historyLength: 0, sharedBytes: 0, prefillTokens: undefined };
}

function durabilityOf(durability: WireDurability): Durability {
  switch (durability) {
    case WireDurability.UNSPECIFIED: // an older server
    case WireDurability.NONE:
      return "none";
    case WireDurability.PROCESS:
      return "process";
    case WireDurability.POWER:
      return "power";
    default:
      return "unknown";
  }
}

/**
 * The facts of a session that was made before.
 *
 * @internal
 */
export function reopenedFacts(id: string, info: GetSessionInfoResponse, server: GetServerInfoResponse): SessionFacts {
  const { mode, modelId, durability } = server;
  return {
    ...sharedFacts({ ...info, sessionId: id, mode, modelId, durability }),
    historyLength: exact(info.historyLength, "history_length"),
    sharedBytes: 0,
    prefillTokens: undefined,
  };
}

/** @internal */
export function forkedFacts(reply: ForkSessionResponse | RewindSessionResponse): SessionFacts {
  return {
    ...sharedFacts(reply),
    historyLength: exact(reply.historyLength, "history_length"),
    sharedBytes: exact(reply.sharedBytes, "shared_bytes"),
    prefillTokens:
      reply.prefillTokenCount === undefined ? undefined : exact(reply.prefillTokenCount, "prefill_token_count"),
  };
}

type SharedField =
  | "sessionId"
  | "strategy"
  | "sustainedBytes"
  | "reservedBytes"
  | "peakBytes"
  | "tierBytes"
  | "limitTokens"
  | "mode"
  | "modelId"
  | "durability";

function sharedFacts(
  reply: Pick<CreateSessionResponse | ForkSessionResponse | RewindSessionResponse, SharedField>,
): Omit<SessionFacts, "historyLength" | "sharedBytes" | "prefillTokens"> {
  return {
    id: reply.sessionId,
    strategy: strategyFromWire(reply.strategy),
    sustainedBytes: exact(reply.sustainedBytes, "sustained_bytes"),
    reservedBytes: exact(reply.reservedBytes, "reserved_bytes"),
    peakBytes: exact(reply.peakBytes, "peak_bytes"),
    tierBytes: exact(reply.tierBytes, "tier_bytes"),
    limitTokens: reply.limitTokens === undefined ? undefined : exact(reply.limitTokens, "limit_tokens"),
    mode: modeOf(reply.mode),
    modelId: reply.modelId,
    durability: durabilityOf(reply.durability),
  };
}

/** @internal */
export function sessionInfoOf(reply: GetSessionInfoResponse): SessionInfo {
  return {
    historyLength: exact(reply.historyLength, "history_length"),
    cachedTokens: exact(reply.cachedTokenCount, "cached_token_count"),
    evictedTokens: exact(reply.evictedTokenCount, "evicted_token_count"),
    kvLiveBytes: exact(reply.kvLiveBytes, "kv_live_bytes"),
    sustainedBytes: exact(reply.sustainedBytes, "sustained_bytes"),
    reservedBytes: exact(reply.reservedBytes, "reserved_bytes"),
    peakBytes: exact(reply.peakBytes, "peak_bytes"),
    limitTokens: reply.limitTokens === undefined ? undefined : exact(reply.limitTokens, "limit_tokens"),
    strategy: strategyFromWire(reply.strategy),
    isGenerating: reply.generating,
    idleSeconds: reply.idleSeconds,
    failureReason: reply.failureReason,
    inv1Violations: exact(reply.cacheInvariantInv1Violations, "cache_invariant_inv1_violations"),
    inv2Violations: exact(reply.cacheInvariantInv2Violations, "cache_invariant_inv2_violations"),
    inv3Violations: exact(reply.cacheInvariantInv3Violations, "cache_invariant_inv3_violations"),
    draftedTokens: exact(reply.draftedTokenCount, "drafted_token_count"),
    acceptedTokens: exact(reply.acceptedTokenCount, "accepted_token_count"),
    tierLiveBytes: exact(reply.tierLiveBytes, "tier_live_bytes"),
    tierBytes: exact(reply.tierBytes, "tier_bytes"),
    label: reply.clientLabel,
    historyBytes: exact(reply.historyBytes, "history_bytes"),
    isResident: reply.resident,
    savedTokens: exact(reply.savedTokenCount, "saved_token_count"),
    spareLiveBytes: exact(reply.spareLiveBytes, "spare_live_bytes"),
    eosTokenIds: reply.eosTokenIds,
  };
}

/** @internal */
export function sessionSummaryOf(listed: WireSummary): SessionSummary {
  return {
    id: listed.sessionId,
    label: listed.clientLabel,
    historyLength: exact(listed.historyLength, "history_length"),
    ageSeconds: listed.ageSeconds,
    idleSeconds: listed.idleSeconds,
    isResident: listed.resident,
    isGenerating: listed.generating,
    failureReason: listed.failureReason,
    strategy: strategyFromWire(listed.strategy),
  };
}

/** @internal */
export function historyPieceOf(reply: ReadHistoryResponse): HistoryPiece {
  return {
    firstPosition: exact(reply.firstPosition, "first_position"),
    tokenIds: reply.tokenIds,
    runLengths: reply.runLengths,
    historyLength: exact(reply.historyLength, "history_length"),
  };
}

/** @internal */
export function serverInfoOf(reply: GetServerInfoResponse): ServerInfo {
  return {
    version: reply.version,
    modelId: reply.modelId,
    vocabSize: reply.vocabSize,
    trainedPositions: exact(reply.trainedPositionCount, "trained_position_count"),
    device: reply.device,
    dtype: reply.dtype,
    mode: modeOf(reply.mode),
    strategies: reply.strategies,
    defaultStrategy: strategyFromWire(reply.defaultStrategy),
    maxGenerateTokens: reply.maxTokensLimit,
    maxAppendTokens: reply.maxAppendTokens,
    maxMessageBytes: reply.maxMessageBytes,
    kvCapacityBytes: exact(reply.kvCapacityBytes, "kv_capacity_bytes"),
    kvReservedBytes: exact(reply.kvReservedBytes, "kv_reserved_bytes"),
    segmentTokens: reply.segmentTokens,
    sessionIdleTtlSeconds: reply.sessionIdleTtlSeconds,
    drafter: reply.drafter,
    tierCapacityBytes: exact(reply.tierCapacityBytes, "tier_capacity_bytes"),
    tierReservedBytes: exact(reply.tierReservedBytes, "tier_reserved_bytes"),
    defaultLimitTokens:
      reply.defaultLimitTokens === undefined ? undefined : exact(reply.defaultLimitTokens, "default_limit_tokens"),
    growthGuaranteed: reply.growthGuaranteed,
    historyTokensPerSession: exact(reply.historyTokensPerSession, "history_tokens_per_session"),
    historyTokensPerOwner: exact(reply.historyTokensPerOwner, "history_tokens_per_owner"),
    historyTokens: exact(reply.historyTokenCount, "history_token_count"),
    backend: reply.backend,
    numerics: reply.numerics,
    durability: durabilityOf(reply.durability),
    eosTokenIds: reply.eosTokenIds,
    sharesPrefixes: reply.sharesPrefixes,
    prefixCapacityBytes: exact(reply.prefixCapacityBytes, "prefix_capacity_bytes"),
    prefixBytes: exact(reply.prefixBytes, "prefix_bytes"),
    usage: reply.usage === undefined ? undefined : usageOf(reply.usage),
    recurrentStateBytes: exact(reply.recurrentStateBytes, "recurrent_state_bytes"),
  };
}

function usageOf(usage: WireUsage): Usage {
  return Object.freeze({
    prefilledTokens: exact(usage.prefilledTokenCount, "prefilled_token_count"),
    cachedTokens: exact(usage.cachedTokenCount, "cached_token_count"),
    generatedTokens: exact(usage.generatedTokenCount, "generated_token_count"),
    draftedTokens: exact(usage.draftedTokenCount, "drafted_token_count"),
    acceptedTokens: exact(usage.acceptedTokenCount, "accepted_token_count"),
  });
}
