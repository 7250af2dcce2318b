/**
 * KV strategies as plain values: what a session keeps in memory, chosen when it is created.
 *
 * Each is `{ kind, …options }`, the options named like those of its arm on the wire. An option that is left out is the
 * server's to decide; a session's `strategy` has every one in force. A strategy with an arm of its own on the wire is an
 * interface here, in the union; `Named` is any strategy that the server has.
 */
import { create, isFieldSet, ScalarType, type DescField, type DescMessage } from "@bufbuild/protobuf";

import { exact, finiteOf, invalid, shown, uint32Of, uint64Of, wholeIn } from "./checks.js";
import { StrategySchema, type Strategy as WireStrategy } from "./generated/kakeya/v1/runtime_pb.js";

/** Compression of KV entries, if a codec is named. */
export interface Coding {
  /** Name of a compressor, such as "int8", for the KV entries before the last `exactWindow` positions. */
  readonly codec?: string | undefined;
  /** The last positions whose KV entries are not compressed. */
  readonly exactWindow?: number | undefined;
  /** Layers, numbered from 0, whose KV entries are never compressed. */
  readonly exactLayers?: readonly number[] | undefined;
}

/** All KV entries are kept. The session ends at the model's trained positions. */
export interface Full extends Coding {
  readonly kind: "full";
}

/** Keeps the first `sink` and at least the last `window` KV entries; the rest are evicted and never read again. */
export interface SinkWindow extends Coding {
  readonly kind: "sink_window";
  readonly sink?: number | undefined;
  readonly window?: number | undefined;
}

/**
 * Keeps all KV entries in `fullLayers`, numbered from 0; sink and window in the others, as in `SinkWindow`.
 *
 * Which layers a model needs to find again what was said long ago is a fact of the model. Layers with a sliding window
 * of its own stay as they are and cannot be named. The session ends at the model's trained positions.
 */
export interface LayerWindow extends Coding {
  readonly kind: "layer_window";
  readonly fullLayers: readonly number[];
  readonly sink?: number | undefined;
  readonly window?: number | undefined;
}

/**
 * Keeps the KV entries of `SinkWindow`; each Generate restores the others and reads every position. The session ends at the
 * model's trained positions.
 */
export interface Restored {
  readonly kind: "restored";
  readonly sink?: number | undefined;
  readonly window?: number | undefined;
  /** Source of restored entries: "recompute" from the token ids, "latent" from `bytesPerToken` stored for each,
   * "drafter" from as many of what the server's drafter read of each. */
  readonly source?: string | undefined;
  readonly bytesPerToken?: number | undefined;
  /**
   * "hold" restores once and holds all of them while it generates, "stream" a chunk at a time, for each token again,
   * "select" only those that a generated token chooses, as `Gather` does.
   */
  readonly mode?: string | undefined;
  /** How much of what is kept stays on the device. */
  readonly residentLatentBytes?: number | undefined;
  /** Of "select": entries that a generated token may read. */
  readonly budget?: number | undefined;
  /** Of "select", as for `Gather`. */
  readonly rank?: number | undefined;
  /** Of "select", as for `Gather`. */
  readonly bits?: number | undefined;
  /** Of "select", as for `Gather`. */
  readonly run?: number | undefined;
  /** Of "select": bytes of restored entries that are held while it generates. */
  readonly awakeBytes?: number | undefined;
  /** Of "select": "all" lets appended tokens read everything, "select" lets each choose, too. */
  readonly appended?: string | undefined;
}

/**
 * Keeps all KV entries; a generated token reads `budget` of them: sink, window, the best-scoring tokens or blocks.
 * Appended tokens read all entries. The session ends at the model's trained positions.
 */
export interface Gather {
  readonly kind: "gather";
  readonly budget?: number | undefined;
  /** Positions of a block. */
  readonly block?: number | undefined;
  readonly sink?: number | undefined;
  readonly window?: number | undefined;
  /** "components" selects tokens by an index of their keys, "bounds" selects blocks. */
  readonly scorer?: string | undefined;
  /** Of the index: components of a key. */
  readonly rank?: number | undefined;
  /** Of the index: bits of a component. */
  readonly bits?: number | undefined;
  /** Of the index: positions that share a rotation, 1, 2, 4 or 8. */
  readonly run?: number | undefined;
}

/**
 * Keeps all KV entries: the last `residentTokens` and the sink on the device, others in the second tier. Tokens
 * read as with `Gather`; what a generated one needs of the others is fetched.
 */
export interface Tiered {
  readonly kind: "tiered";
  readonly budget?: number | undefined;
  readonly block?: number | undefined;
  readonly sink?: number | undefined;
  readonly window?: number | undefined;
  readonly residentTokens?: number | undefined;
}

/**
 * Keeps all KV entries; a generated token reuses the attention of a similar recent query, reads newer ones. Appended
 * tokens read all entries. The session ends at the model's trained positions. A server has it if the package kakeya-mac is
 * installed.
 */
export interface Mac {
  readonly kind: "mac";
  /** Positions searched for a similar query. */
  readonly ring?: number | undefined;
  /** Entries before the similar query's token that are read again. */
  readonly band?: number | undefined;
  /** How near, as a share of the distance of unlike queries; 0: nothing is taken over. */
  readonly threshold?: number | undefined;
  /** Links back to a token that read every KV entry; -1: any number. */
  readonly chainLimit?: number | undefined;
}

/**
 * Any strategy of the server's, by its name; `serverInfo().strategies` lists them.
 *
 * Options are those of the server's `--strategy`, by the names that they have there: `{ ring: 128, chain_limit: -1 }`. A
 * name or an option that the server does not have is InvalidArgument, which lists those that it has. A session's
 * `strategy` is of this kind if the strategy has no other here; its options are text then.
 */
export interface Named {
  readonly kind: "named";
  /** The strategy's name on the server. */
  readonly name: string;
  /** Each a number, a name, or whole numbers; an option that is undefined is left to the server. */
  readonly options?: Readonly<Record<string, number | string | readonly number[] | undefined>> | undefined;
}

export type Strategy = Full | SinkWindow | LayerWindow | Restored | Gather | Tiered | Mac | Named;

type Options = Record<string, unknown>;

/** The arms of the contract by the name that `kind` gives them. */
const ARMS = new Map<string, { readonly localName: string; readonly message: DescMessage }>();
for (const { name, localName, message } of StrategySchema.fields) {
  if (message !== undefined) ARMS.set(name, { localName, message });
}

/**
 * The strategy as it goes on the wire. Throws InvalidArgument for what protobuf would take wrongly or leave out.
 *
 * @internal
 */
export function strategyToWire(strategy: Strategy): WireStrategy {
  const given: unknown = strategy;
  const isObject = typeof given === "object" && given !== null && "kind" in given;
  const kind: unknown = isObject ? given.kind : given;
  const arm = isObject && typeof kind === "string" ? ARMS.get(kind) : undefined;
  if (arm === undefined) {
    throw invalid(
      "strategy",
      `must be an object whose kind is one of ${[...ARMS.keys()].join(", ")}; got ${shown(kind)}`,
    );
  }
  if (kind === "named") return create(StrategySchema, { kind: { case: "named", value: namedOf(given as Named) } });
  const path = `strategy.${arm.localName}`;
  const value: Options = {};
  for (const [name, option] of Object.entries(strategy)) {
    if (name === "kind") continue;
    const field = arm.message.fields.find((each) => each.localName === name);
    if (field === undefined) {
      const known = arm.message.fields.map((each) => each.localName).join(", ");
      throw invalid(`${path}.${name}`, `is not an option of ${strategy.kind}; those are ${known}`);
    }
    if (option !== undefined) value[name] = optionOf(field, option, `${path}.${name}`);
  }
  return create(StrategySchema, { kind: { case: arm.localName, value } } as Parameters<
    typeof create<typeof StrategySchema>
  >[1]);
}

/**
 * The strategy of a reply; undefined if it is of a kind newer than this SDK.
 *
 * @internal
 */
export function strategyFromWire(message: WireStrategy | undefined): Strategy | undefined {
  const arm = message?.kind;
  if (arm?.case === undefined) return undefined;
  if (arm.case === "named") return { kind: "named", name: arm.value.name, options: { ...arm.value.options } };
  const desc = StrategySchema.fields.find((each) => each.localName === arm.case);
  const strategy: Options = { kind: desc?.name };
  for (const field of desc?.message?.fields ?? []) {
    if (!isFieldSet(arm.value, field)) continue;
    const value = (arm.value as unknown as Options)[field.localName];
    strategy[field.localName] = typeof value === "bigint" ? exact(value, field.name) : value;
  }
  return strategy as unknown as Strategy;
}

function namedOf(given: Named): { name: string; options: Record<string, string> } {
  for (const name of Object.keys(given)) {
    if (!["kind", "name", "options"].includes(name)) {
      throw invalid(`strategy.named.${name}`, "is not known; the strategy's own options go into options");
    }
  }
  const name: unknown = given.name;
  if (typeof name !== "string" || name === "") {
    throw invalid("strategy.named.name", `must be the name of a strategy, got ${shown(name)}`);
  }
  const options: unknown = given.options ?? {};
  if (typeof options !== "object" || options === null || Array.isArray(options)) {
    throw invalid("strategy.named.options", `must be an object of options by name, got ${shown(options)}`);
  }
  const texts = Object.entries(options)
    .filter(([, value]) => value !== undefined)
    .map(([option, value]) => [option, textOf(value, `strategy.named.options.${option}`)] as const);
  return { name, options: Object.fromEntries(texts) };
}

/** An option of a named strategy as the server reads it. */
function textOf(value: unknown, name: string): string {
  if (typeof value === "string" && value !== "") return value;
  if (typeof value === "number" && Number.isFinite(value)) return String(value);
  if (Array.isArray(value) && value.length > 0 && value.every((each) => Number.isSafeInteger(each) && each >= 0)) {
    return value.join("+");
  }
  throw invalid(name, `must be a number, a name or an array of whole numbers, got ${shown(value)}`);
}

function optionOf(field: DescField, given: unknown, name: string): unknown {
  if (field.fieldKind === "list") {
    if (!Array.isArray(given)) throw invalid(name, `must be an array of layer numbers, got ${shown(given)}`);
    return given.map((layer: unknown, index) => uint32Of(layer as number, `${name}[${index}]`));
  }
  switch (field.scalar) {
    case ScalarType.UINT32:
      return uint32Of(given as number, name);
    case ScalarType.UINT64:
      return uint64Of(given as number, name);
    case ScalarType.SINT32:
      return wholeIn(given as number, name, -(2 ** 31), 2 ** 31 - 1);
    case ScalarType.STRING:
      if (typeof given === "string" && given !== "") return given;
      throw invalid(name, `must be a name, got ${shown(given)}`);
    default:
      return finiteOf(given as number, name);
  }
}
