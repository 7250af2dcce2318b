/** What callers may say of a client and its calls. An option of any other name is an error: it would be lost in silence. */
import { invalid, shown, type TokenIds } from "./checks.js";
import type { Constraint } from "./constraints.js";
import type { RetryPolicy } from "./retry.js";
import type { Strategy } from "./strategies.js";
import type { ChatOptions, NextTurnOptions } from "./chat-tokens.js";
import type { ToolConstraintOptions, ToolsOptions } from "./tools.js";
import type { Progress } from "./values.js";

/** A PEM file's contents, or its path. */
export type Pem = Uint8Array | string;

/**
 * Certificates for an encrypted connection.
 *
 * Without `rootCertificates` the server is checked against Node's own list of authorities. `certificate` and `key` come
 * together, for a server that asks its clients for one.
 */
export interface TLS {
  readonly rootCertificates?: Pem;
  readonly certificate?: Pem;
  readonly key?: Pem;
}

/** An AbortSignal, as the program's own types have it: those of Node.js, or of a browser. */
export type Signal = typeof globalThis extends { AbortSignal: { prototype: infer S } } ? S : never;

/** What every call takes. */
export interface CallOptions {
  /** For all attempts of the call together; null: no limit. Default: the client's. */
  readonly timeoutSeconds?: number | null | undefined;
  /** Stops the call, which then fails with the signal's reason. */
  readonly signal?: Signal | undefined;
}

/** How a client is made. */
export interface ClientOptions {
  /** Sent as a bearer token with every call. */
  readonly apiKey?: string | undefined;
  /** Encrypt; true: with Node's list of authorities. Default false. */
  readonly tls?: TLS | boolean | undefined;
  /** Default for every call but `generate`; null: no limit. Default 30. */
  readonly timeoutSeconds?: number | null | undefined;
  /** Default for `generate`; null: no limit. Default 3600. */
  readonly generateTimeoutSeconds?: number | null | undefined;
  readonly retry?: RetryPolicy | undefined;
}

/** How a session is made. */
export interface CreateSessionOptions extends CallOptions {
  /** What the session keeps and reads. Default: the server's. */
  readonly strategy?: Strategy | undefined;
  /** Ids that end every Generate of the session; none: []. Default: what ends a turn of the model, as in `serverInfo()`. */
  readonly eosTokenIds?: TokenIds | undefined;
  /** The session's own length limit; a smaller limit is a smaller bound. */
  readonly limitTokens?: number | bigint | undefined;
  /**
   * true reserves all of `sustainedBytes` now; false lets the server grant memory as the history grows: an append or a
   * generate may then throw NoCapacity, the history kept. Default: as the server is set.
   */
  readonly guaranteed?: boolean | undefined;
  /** Your own name for the session, at most 128 printable characters; `info()` returns it. */
  readonly label?: string | undefined;
}

/** How an append is made. */
export interface AppendOptions extends CallOptions {
  /** A history of any other length is left as it is. */
  readonly expectedHistoryLength?: number | undefined;
}

/** How a fork is made. */
export interface ForkOptions extends CallOptions {
  /** How many tokens of the history it begins with. Default: all. */
  readonly atPosition?: number | undefined;
  /** A session of any other length is not forked. */
  readonly expectedHistoryLength?: number | undefined;
  /** The fork's own length limit. Default: that of the session it is made from. */
  readonly limitTokens?: number | bigint | undefined;
  /** Your own name for the session, at most 128 printable characters; `info()` returns it. */
  readonly label?: string | undefined;
}

/** How a session is rewound. */
export interface RewindOptions extends CallOptions {
  /** A session of any other length is left as it is. */
  readonly expectedHistoryLength?: number | undefined;
}

/** How sessions are listed. `timeoutSeconds` is for each page. */
export interface SessionsOptions extends CallOptions {
  /** Sessions in one answer of the server, at most 1000. Default 100. */
  readonly pageSize?: number | undefined;
}

/** How a history is read. `timeoutSeconds` is for each piece. */
export interface HistoryOptions extends CallOptions {
  /** Absolute position of the first token wanted. Default 0. */
  readonly firstPosition?: number | undefined;
  /** Tokens in one piece, at most 16384, which is the default. */
  readonly pieceTokens?: number | undefined;
}

/** How a history is prefilled. */
export interface PrefillOptions extends CallOptions {
  /** Called meanwhile. */
  readonly onProgress?: ((progress: Progress) => void) | undefined;
  /** A history of any other length is left as it is. */
  readonly expectedHistoryLength?: number | undefined;
}

/** How tokens are drawn, when to stop, and what to report. */
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
  /** From -2 to 2; 0: off. Subtracted from the logit of each id that this Generate has given: once. */
  readonly presencePenalty?: number | undefined;
  /** The same, once for each time. */
  readonly frequencyPenalty?: number | undefined;
  /** Added to the logits, by token id. */
  readonly logitBias?: ReadonlyMap<number, number> | undefined;
  /** End this Generate, beside the session's own. */
  readonly stopTokenIds?: TokenIds | undefined;
  /** End this Generate when its last tokens are one of them; `GenerateStream.text` knows stop strings. */
  readonly stopSequences?: readonly TokenIds[] | undefined;
  /** Among so many first tokens nothing ends it. */
  readonly minTokens?: number | undefined;
  /** What may be drawn at all, any number of ids. Default: anything. */
  readonly allowedTokenIds?: TokenIds | undefined;
  /** What may not be drawn. */
  readonly bannedTokenIds?: TokenIds | undefined;
  /** Report each token's log-probability. */
  readonly logprobs?: boolean | undefined;
  /** Of so many of the likeliest tokens in each place, too, at most 20; it asks for `logprobs`. */
  readonly topLogprobs?: number | undefined;
  /** Called while the stream is read, before its first token. */
  readonly onProgress?: ((progress: Progress) => void) | undefined;
  /** A history of any other length is left as it is. */
  readonly expectedHistoryLength?: number | undefined;
  /** May the server's drafter be used? It changes the speed, never a token. Default true. */
  readonly drafting?: boolean | undefined;
  /** What the tokens have to spell. The result says whether they do, or were cut. Default: anything. */
  readonly constraint?: Constraint | undefined;
}

/** How a model thinks, and answers: the options are for both; `constraint` and `minTokens` are for the answer alone. */
export interface ThinkingOptions extends GenerateOptions {
  /** What ends the thinking, such as the ids of `</think>`. */
  readonly endTokenIds: TokenIds;
}

/** How a Generate is read as text. */
export interface TextOptions {
  /** Texts that end it. Default: none. */
  readonly stop?: readonly string[] | undefined;
  /** Leave out tokens that are special to the tokenizer. Default true. */
  readonly skipSpecialTokens?: boolean | undefined;
}

/** The names of every option of `T`, in a table that the compiler wants to be whole. */
type Names<T> = Readonly<Record<keyof T, true>>;

const CALL: Names<CallOptions> = { timeoutSeconds: true, signal: true };
const CHAT: Names<ChatOptions> = {
  addGenerationPrompt: true,
  tools: true,
  allowSpecialTokens: true,
  templateOptions: true,
};

const GENERATE: Names<GenerateOptions> = {
  seed: true,
  temperature: true,
  topP: true,
  topK: true,
  minP: true,
  repetitionPenalty: true,
  presencePenalty: true,
  frequencyPenalty: true,
  logitBias: true,
  stopTokenIds: true,
  stopSequences: true,
  minTokens: true,
  allowedTokenIds: true,
  bannedTokenIds: true,
  logprobs: true,
  topLogprobs: true,
  onProgress: true,
  expectedHistoryLength: true,
  drafting: true,
  constraint: true,
  ...CALL,
};

const KNOWN = {
  TLS: { rootCertificates: true, certificate: true, key: true } satisfies Names<TLS>,
  RetryPolicy: {
    attempts: true,
    firstDelaySeconds: true,
    maxDelaySeconds: true,
    patienceSeconds: true,
  } satisfies Names<RetryPolicy>,
  Client: {
    apiKey: true,
    tls: true,
    timeoutSeconds: true,
    generateTimeoutSeconds: true,
    retry: true,
  } satisfies Names<ClientOptions>,
  createSession: {
    strategy: true,
    eosTokenIds: true,
    limitTokens: true,
    guaranteed: true,
    label: true,
    ...CALL,
  } satisfies Names<CreateSessionOptions>,
  append: { expectedHistoryLength: true, ...CALL } satisfies Names<AppendOptions>,
  fork: {
    atPosition: true,
    expectedHistoryLength: true,
    limitTokens: true,
    label: true,
    ...CALL,
  } satisfies Names<ForkOptions>,
  rewind: { expectedHistoryLength: true, ...CALL } satisfies Names<RewindOptions>,
  sessions: { pageSize: true, ...CALL } satisfies Names<SessionsOptions>,
  history: { firstPosition: true, pieceTokens: true, ...CALL } satisfies Names<HistoryOptions>,
  prefill: { onProgress: true, expectedHistoryLength: true, ...CALL } satisfies Names<PrefillOptions>,
  generate: GENERATE,
  generateThinking: { endTokenIds: true, ...GENERATE } satisfies Names<ThinkingOptions>,
  text: { stop: true, skipSpecialTokens: true } satisfies Names<TextOptions>,
  "this call": CALL,
  tokensForChat: CHAT,
  tokensForNextTurn: { after: true, ...CHAT } satisfies Names<NextTurnOptions>,
  endOfTurnIds: CHAT,
  Tools: { format: true, templateOptions: true } satisfies Names<ToolsOptions>,
  constraint: { parallel: true } satisfies Names<ToolConstraintOptions>,
  decode: { skipSpecialTokens: true },
} as const;

/**
 * `options` as they are, once each is known. Throws InvalidArgument with the name of the first that is not.
 *
 * @internal
 */
export function known<T extends object>(options: T, of: keyof typeof KNOWN): T {
  if (typeof options !== "object" || (options as T | null) === null || Array.isArray(options)) {
    throw invalid("options", `of ${of} must be an object, got ${shown(options)}`);
  }
  for (const name of Object.keys(options)) {
    if (!Object.hasOwn(KNOWN[of], name)) {
      throw invalid(name, `is not an option of ${of}; those are ${Object.keys(KNOWN[of]).join(", ")}`);
    }
  }
  return options;
}
