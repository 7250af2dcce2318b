/** From a caller's arguments to request messages. Everything that protobuf would take wrongly is refused here. */
import { randomBytes } from "node:crypto";

import { create } from "@bufbuild/protobuf";

import { booleanOf, finiteOf, textOf, tokenIdsOf, uint32Of, uint64Of, wholeIn, type TokenIds } from "./checks.js";
import { constraintToWire } from "./constraints.js";
import {
  AppendTokensRequestSchema,
  CloseSessionRequestSchema,
  CreateSessionRequestSchema,
  ForkSessionRequestSchema,
  GenerateRequestSchema,
  ListSessionsRequestSchema,
  ReadHistoryRequestSchema,
  RewindSessionRequestSchema,
  type AppendTokensRequest,
  type CloseSessionRequest,
  type CreateSessionRequest,
  type ForkSessionRequest,
  type GenerateRequest,
  type ListSessionsRequest,
  type ReadHistoryRequest,
  type RewindSessionRequest,
} from "./generated/kakeya/v1/runtime_pb.js";
import {
  known,
  type CreateSessionOptions,
  type ForkOptions,
  type GenerateOptions,
  type HistoryOptions,
  type PrefillOptions,
  type RewindOptions,
  type SessionsOptions,
} from "./options.js";
import { strategyToWire } from "./strategies.js";

// The most that the server gives in one answer.
const MAX_PAGE_SESSIONS = 1000;
const MAX_PIECE_TOKENS = 16_384;
// Proxies give up a stream on which nothing comes, most of them after a minute.
const HEARTBEAT_SECONDS = 15;

export function createSessionRequest(options: CreateSessionOptions): CreateSessionRequest {
  const { strategy, limitTokens, guaranteed } = known(options, "createSession");
  return create(CreateSessionRequestSchema, {
    clientLabel: textOf(options.label ?? "", "label"),
    ...(options.eosTokenIds === undefined
      ? { modelEosTokenIds: true }
      : { eosTokenIds: tokenIdsOf(options.eosTokenIds, "eosTokenIds") }),
    ...(strategy === undefined ? {} : { strategy: strategyToWire(strategy) }),
    ...(limitTokens === undefined ? {} : { limitTokens: uint64Of(limitTokens, "limitTokens") }),
    ...(guaranteed === undefined ? {} : { guaranteed: booleanOf(guaranteed, "guaranteed") }),
    requestId: newRequestId(),
  });
}

/** An append at `length`, or at the end. The ids are checked already. */
export function appendRequest(sessionId: string, tokenIds: number[], length?: number): AppendTokensRequest {
  return create(AppendTokensRequestSchema, {
    sessionId,
    tokenIds,
    ...(length === undefined ? {} : { expectedHistoryLength: BigInt(length) }),
    requestId: newRequestId(),
  });
}

/**
 * The request for one Generate, from a history of `length` tokens if the options name no other. It always asks for
 * detailed frames, which carry the history length as it grows, and for a heartbeat before the first token.
 */
export function generateRequest(
  sessionId: string,
  maxTokens: number,
  options: GenerateOptions,
  length: number,
): GenerateRequest {
  const { temperature, topP, topK, minP, repetitionPenalty, seed } = known(options, "generate");
  const topLogprobs = uint32Of(options.topLogprobs ?? 0, "topLogprobs");
  return create(GenerateRequestSchema, {
    sessionId,
    maxTokens: uint32Of(maxTokens, "maxTokens"),
    ...(seed === undefined ? {} : { seed: uint64Of(seed, "seed") }),
    ...(temperature === undefined ? {} : { temperature: finiteOf(temperature, "temperature") }),
    ...(topP === undefined ? {} : { topP: finiteOf(topP, "topP") }),
    ...(topK === undefined ? {} : { topK: uint32Of(topK, "topK") }),
    ...(minP === undefined ? {} : { minP: finiteOf(minP, "minP") }),
    ...(repetitionPenalty === undefined ? {} : { repetitionPenalty: finiteOf(repetitionPenalty, "repetitionPenalty") }),
    presencePenalty: finiteOf(options.presencePenalty ?? 0, "presencePenalty"),
    frequencyPenalty: finiteOf(options.frequencyPenalty ?? 0, "frequencyPenalty"),
    logitBias: biasOf(options.logitBias ?? new Map()),
    stopTokenIds: tokenIdsOf(options.stopTokenIds ?? [], "stopTokenIds"),
    stopSequences: (options.stopSequences ?? []).map((one, at) => ({
      tokenIds: tokenIdsOf(one, `stopSequences[${at}]`),
    })),
    minTokens: uint32Of(options.minTokens ?? 0, "minTokens"),
    ...(options.allowedTokenIds === undefined
      ? {}
      : { allowedTokenIds: tokenSetOf(options.allowedTokenIds, "allowedTokenIds") }),
    ...(options.bannedTokenIds === undefined
      ? {}
      : { bannedTokenIds: tokenSetOf(options.bannedTokenIds, "bannedTokenIds") }),
    ...(booleanOf(options.logprobs ?? false, "logprobs") || topLogprobs > 0 ? { logprobs: true } : {}),
    topLogprobs,
    tokenDetails: true,
    ...(options.onProgress === undefined ? {} : { progress: true }),
    expectedHistoryLength: uint64Of(options.expectedHistoryLength ?? length, "expectedHistoryLength"),
    ...(booleanOf(options.drafting ?? true, "drafting") ? {} : { drafting: false }),
    requestId: newRequestId(),
    heartbeatSeconds: HEARTBEAT_SECONDS,
    ...(options.constraint === undefined ? {} : { constraint: constraintToWire(options.constraint) }),
  });
}

/** The request for a Generate that prefills a history of `length` tokens, if the options name no other, and adds none. */
export function prefillRequest(sessionId: string, options: PrefillOptions, length: number): GenerateRequest {
  const { onProgress, expectedHistoryLength } = known(options, "prefill");
  return create(GenerateRequestSchema, {
    sessionId,
    prefillOnly: true,
    tokenDetails: true,
    ...(onProgress === undefined ? {} : { progress: true }),
    expectedHistoryLength: uint64Of(expectedHistoryLength ?? length, "expectedHistoryLength"),
    requestId: newRequestId(),
    heartbeatSeconds: HEARTBEAT_SECONDS,
  });
}

/** The request for a fork of a history of `length` tokens, if the options name no other. */
export function forkRequest(sessionId: string, options: ForkOptions, length: number): ForkSessionRequest {
  const { atPosition, limitTokens } = known(options, "fork");
  return create(ForkSessionRequestSchema, {
    sessionId,
    clientLabel: textOf(options.label ?? "", "label"),
    ...(limitTokens === undefined ? {} : { limitTokens: uint64Of(limitTokens, "limitTokens") }),
    ...(atPosition === undefined ? {} : { atPosition: uint64Of(atPosition, "atPosition") }),
    expectedHistoryLength: uint64Of(options.expectedHistoryLength ?? length, "expectedHistoryLength"),
    requestId: newRequestId(),
  });
}

/** The request to rewind a history of `length` tokens, if the options name no other. */
export function rewindRequest(
  sessionId: string,
  position: number,
  options: RewindOptions,
  length: number,
): RewindSessionRequest {
  return create(RewindSessionRequestSchema, {
    sessionId,
    atPosition: uint64Of(position, "position"),
    expectedHistoryLength: uint64Of(known(options, "rewind").expectedHistoryLength ?? length, "expectedHistoryLength"),
    requestId: newRequestId(),
  });
}

export function closeRequest(sessionId: string): CloseSessionRequest {
  return create(CloseSessionRequestSchema, { sessionId, requestId: newRequestId() });
}

export function listRequest(options: SessionsOptions): ListSessionsRequest {
  const { pageSize = 100 } = known(options, "sessions");
  return create(ListSessionsRequestSchema, { pageSize: wholeIn(pageSize, "pageSize", 1, MAX_PAGE_SESSIONS) });
}

export function historyRequest(sessionId: string, options: HistoryOptions): ReadHistoryRequest {
  const { firstPosition = 0, pieceTokens = MAX_PIECE_TOKENS } = known(options, "history");
  return create(ReadHistoryRequestSchema, {
    sessionId,
    firstPosition: uint64Of(firstPosition, "firstPosition"),
    maxTokens: wholeIn(pieceTokens, "pieceTokens", 1, MAX_PIECE_TOKENS),
  });
}

/** The ids, neighbours as ranges. */
function tokenSetOf(values: TokenIds, name: string): { tokenIds: number[]; ranges: number[] } {
  const found = { tokenIds: [] as number[], ranges: [] as number[] };
  const ids = [...new Set(tokenIdsOf(values, name))].sort((one, other) => one - other);
  let start = 0;
  for (let place = 1; place <= ids.length; place += 1) {
    if (place < ids.length && ids[place] === (ids[place - 1] ?? 0) + 1) continue;
    const run = ids.slice(start, place);
    if (run.length > 2) found.ranges.push(run[0] ?? 0, (run.at(-1) ?? 0) + 1);
    else found.tokenIds.push(...run);
    start = place;
  }
  return found;
}

function biasOf(bias: ReadonlyMap<number, number>): Record<number, number> {
  const ids = tokenIdsOf(bias.keys(), "logitBias");
  const biases: Record<number, number> = {};
  for (const [at, value] of [...bias.values()].entries()) {
    const id = ids[at] ?? 0;
    biases[id] = finiteOf(value, `logitBias[${id}]`);
  }
  return biases;
}

/** By this the server knows a request again, and answers it as it did the first time. */
export function newRequestId(): Uint8Array {
  return Uint8Array.from(randomBytes(16));
}
