/** From a caller's arguments to request messages. Everything that protobuf would take wrongly is refused here. */
import { randomBytes } from "node:crypto";

import { create } from "@bufbuild/protobuf";

import { booleanOf, finiteOf, textOf, tokenIdsOf, uint32Of, uint64Of, type TokenIds } from "./checks.js";
import {
  AppendTokensRequestSchema,
  CloseSessionRequestSchema,
  CreateSessionRequestSchema,
  ForkSessionRequestSchema,
  GenerateRequestSchema,
  type AppendTokensRequest,
  type CloseSessionRequest,
  type CreateSessionRequest,
  type ForkSessionRequest,
  type GenerateRequest,
} from "./generated/kakeya/v1/runtime_pb.js";
import type { CallOptions } from "./link.js";
import { strategyToWire, type Strategy } from "./strategies.js";
import type { Progress } from "./values.js";

/** How a session is made. */
export interface CreateSessionOptions extends CallOptions {
  /** What the session keeps and reads. Default: the server's. */
  readonly strategy?: Strategy | undefined;
  /** Ids that end every Generate of the session. */
  readonly eosTokenIds?: TokenIds | undefined;
  /** The session's own length limit; a smaller limit is a smaller bound. */
  readonly limitTokens?: number | bigint | undefined;
  /**
   * true reserves all of `sustainedBytes` now; false lets the server grant memory as the history grows: an append or a
   * generate may then throw NoCapacity, the history kept. Default: as the server is set.
   */
  readonly guaranteed?: boolean | undefined;
  /** Your own name for the session, at most 128 printable characters; `info()` tells it. */
  readonly label?: string | undefined;
}

/** How an append is made. */
export interface AppendOptions extends CallOptions {
  /** A history of any other length is left as it is. */
  readonly expectedHistoryLength?: number | undefined;
}

/** How a fork is made. */
export interface ForkOptions extends CallOptions {
  /** A session of any other length is not forked. */
  readonly expectedHistoryLength?: number | undefined;
  /** The fork's own length limit. Default: that of the session it is made from. */
  readonly limitTokens?: number | bigint | undefined;
  /** Your own name for the session, at most 128 printable characters; `info()` tells it. */
  readonly label?: string | undefined;
}

/** How tokens are drawn, when to stop, and what to tell. */
export interface GenerateOptions extends CallOptions {
  /** The same seed at the same position draws the same token. Default: the server draws one; the result has it. */
  readonly seed?: number | bigint | undefined;
  /** 0 or left out: greedy. */
  readonly temperature?: number | undefined;
  /** In (0, 1]; 1: off. */
  readonly topP?: number | undefined;
  /** 0: off. */
  readonly topK?: number | undefined;
  /** In [0, 1]; 0: off. */
  readonly minP?: number | undefined;
  /** 1: off. Applied to every id of the whole history. */
  readonly repetitionPenalty?: number | undefined;
  /** Added to the logits, by token id. */
  readonly logitBias?: ReadonlyMap<number, number> | undefined;
  /** End this Generate, beside the session's own. */
  readonly stopTokenIds?: TokenIds | undefined;
  /** Tell each token's log-probability. */
  readonly logprobs?: boolean | undefined;
  /** Called while the stream is read, before its first token. */
  readonly onProgress?: ((progress: Progress) => void) | undefined;
  /** A history of any other length is left as it is. */
  readonly expectedHistoryLength?: number | undefined;
  /** May the server's drafter guess ahead? That changes no token, only how fast they come. Default true. */
  readonly drafting?: boolean | undefined;
}

export function createSessionRequest(options: CreateSessionOptions): CreateSessionRequest {
  const { strategy, limitTokens, guaranteed } = options;
  return create(CreateSessionRequestSchema, {
    clientLabel: textOf(options.label ?? "", "label"),
    eosTokenIds: tokenIdsOf(options.eosTokenIds ?? [], "eosTokenIds"),
    ...(strategy === undefined ? {} : { strategy: strategyToWire(strategy) }),
    ...(limitTokens === undefined ? {} : { limitTokens: uint64Of(limitTokens, "limitTokens") }),
    ...(guaranteed === undefined ? {} : { guaranteed: booleanOf(guaranteed, "guaranteed") }),
    requestId: newRequestId(),
  });
}

/** An append at `length`. The ids are checked already. */
export function appendRequest(sessionId: string, tokenIds: number[], length: number): AppendTokensRequest {
  return create(AppendTokensRequestSchema, {
    sessionId,
    tokenIds,
    expectedHistoryLength: BigInt(length),
    requestId: newRequestId(),
  });
}

/** The request for one Generate. It always asks for detailed frames: they tell the history length as it grows. */
export function generateRequest(sessionId: string, maxTokens: number, options: GenerateOptions): GenerateRequest {
  const { temperature, topP, topK, minP, repetitionPenalty, seed } = options;
  return create(GenerateRequestSchema, {
    sessionId,
    maxTokens: uint32Of(maxTokens, "maxTokens"),
    ...(seed === undefined ? {} : { seed: uint64Of(seed, "seed") }),
    ...(temperature === undefined ? {} : { temperature: finiteOf(temperature, "temperature") }),
    ...(topP === undefined ? {} : { topP: finiteOf(topP, "topP") }),
    ...(topK === undefined ? {} : { topK: uint32Of(topK, "topK") }),
    ...(minP === undefined ? {} : { minP: finiteOf(minP, "minP") }),
    ...(repetitionPenalty === undefined ? {} : { repetitionPenalty: finiteOf(repetitionPenalty, "repetitionPenalty") }),
    logitBias: biasOf(options.logitBias ?? new Map()),
    stopTokenIds: tokenIdsOf(options.stopTokenIds ?? [], "stopTokenIds"),
    ...(options.logprobs === true ? { logprobs: true } : {}),
    tokenDetails: true,
    ...(options.onProgress === undefined ? {} : { progress: true }),
    ...expectedLength(options),
    ...(options.drafting === false ? { drafting: false } : {}),
    requestId: newRequestId(),
  });
}

export function forkRequest(sessionId: string, options: ForkOptions): ForkSessionRequest {
  const { limitTokens } = options;
  return create(ForkSessionRequestSchema, {
    sessionId,
    clientLabel: textOf(options.label ?? "", "label"),
    ...(limitTokens === undefined ? {} : { limitTokens: uint64Of(limitTokens, "limitTokens") }),
    ...expectedLength(options),
    requestId: newRequestId(),
  });
}

export function closeRequest(sessionId: string): CloseSessionRequest {
  return create(CloseSessionRequestSchema, { sessionId, requestId: newRequestId() });
}

function expectedLength(options: { readonly expectedHistoryLength?: number | undefined }): {
  expectedHistoryLength?: bigint;
} {
  const length = options.expectedHistoryLength;
  return length === undefined ? {} : { expectedHistoryLength: uint64Of(length, "expectedHistoryLength") };
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
function newRequestId(): Uint8Array {
  return Uint8Array.from(randomBytes(16));
}
