/**
 * What a number has to be before it goes on the wire.
 *
 * JavaScript has one kind of number, and protobuf's own complaint names no argument; here each is named, with its place
 * and value. Ranges that are the runtime's to decide (temperature, topP, …) stay the runtime's.
 *
 * 64-bit fields: lengths and bytes are numbers, checked to be exact (below 2^53); seeds, which use all 64 bits, are
 * bigints on the way out and numbers or bigints on the way in.
 */
import { InvalidArgument, InvalidTokenIds, ProtocolError } from "./errors.js";

const MAX_UINT32 = 2 ** 32 - 1;
const MAX_UINT64 = 2n ** 64n - 1n;
const MAX_FLOAT32 = 3.4028234663852886e38;
/** The longest wait that gRPC's timeout header can say in milliseconds, and a JavaScript timer can wait. */
export const MAX_SECONDS = 99_999;

/** Token ids of any origin: arrays, typed arrays, the bigints of a tensor. */
export type TokenIds = Iterable<number | bigint>;

/** `values` as integers in [0, 2^32). Throws InvalidTokenIds at the first that is not one. */
export function tokenIdsOf(values: TokenIds, name: string): number[] {
  const given: unknown = values;
  if (typeof given !== "object" || given === null || !(Symbol.iterator in given)) {
    const kind = given === null ? "null" : typeof given;
    throw new InvalidTokenIds(
      `${name} must be a sequence of integers, got ${kind}; @kakeya/runtime/tokenization turns text and messages into ids`,
      { field: wireName(name), index: undefined, value: values },
    );
  }
  return Array.from(values, (value, index) => {
    const id = wholeOf(value);
    if (id !== undefined && id >= 0n && id <= MAX_UINT32) return Number(id);
    const problem = id === undefined ? "must be an integer" : `must be in [0, ${MAX_UINT32}]`;
    throw new InvalidTokenIds(`${name}[${index}] ${problem}, got ${shown(value)}`, {
      field: wireName(name),
      index,
      value,
    });
  });
}

/** `value` as a number in [atLeast, 2^32). Throws InvalidArgument. */
export function uint32Of(value: number, name: string, atLeast = 0): number {
  return wholeIn(value, name, atLeast, MAX_UINT32);
}

/** `value` as a number in [atLeast, atMost]. Throws InvalidArgument. */
export function wholeIn(value: number, name: string, atLeast: number, atMost: number): number {
  if (Number.isInteger(value) && value >= atLeast && value <= atMost) return value;
  throw invalid(name, `must be an integer in [${atLeast}, ${atMost}], got ${shown(value)}`);
}

/** `value` as 64 bits without a sign. A number must be one that JavaScript keeps exactly. Throws InvalidArgument. */
export function uint64Of(value: number | bigint, name: string): bigint {
  const whole = wholeOf(value);
  if (whole === undefined || whole < 0n || whole > MAX_UINT64) {
    throw invalid(name, `must be an integer in [0, ${MAX_UINT64}], got ${shown(value)}`);
  }
  if (typeof value === "number" && !Number.isSafeInteger(value)) {
    throw invalid(name, `is beyond what a number holds exactly; write it as a bigint, got ${shown(value)}`);
  }
  return whole;
}

/** A given boolean as it is. Throws InvalidArgument for anything else. */
export function booleanOf(value: unknown, name: string): boolean {
  if (typeof value !== "boolean") {
    throw invalid(name, `must be true or false, got ${shown(value)}`);
  }
  return value;
}

/** `value` as a number that a 32-bit float can hold. Throws InvalidArgument. */
export function finiteOf(value: number, name: string): number {
  if (typeof value === "number" && Math.abs(value) <= MAX_FLOAT32) return value;
  throw invalid(name, `must be a finite number, got ${shown(value)}`);
}

/** A duration above 0, or null for no limit. Throws InvalidArgument. */
export function secondsOf(value: number | null, name: string): number | null {
  if (value === null || (typeof value === "number" && value > 0 && value <= MAX_SECONDS)) return value;
  throw invalid(name, `must be above 0 and at most ${MAX_SECONDS} seconds, or null for no limit; got ${shown(value)}`);
}

/** Throws InvalidArgument unless `value` is a text. */
export function textOf(value: string, name: string): string {
  if (typeof value === "string") return value;
  throw invalid(name, `must be a text, got ${shown(value)}`);
}

/** A 64-bit fact of the server's as an exact number. Throws ProtocolError above 2^53. */
export function exact(value: bigint, name: string): number {
  if (value <= Number.MAX_SAFE_INTEGER) return Number(value);
  throw new ProtocolError(`${name} is ${value}, more than JavaScript can count exactly`);
}

/** The error for an argument refused on this side of the wire. */
export function invalid(name: string, problem: string): InvalidArgument {
  return new InvalidArgument(`${name} ${problem}`, { metadata: { field: wireName(name) } });
}

/** `topP` is `top_p` in the contract, which is how an error's field is given, by the SDK and by the server. */
function wireName(name: string): string {
  return name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
}

function wholeOf(value: unknown): bigint | undefined {
  if (typeof value === "bigint") return value;
  return Number.isInteger(value) ? BigInt(value as number) : undefined;
}

/** A value as its author wrote it, and what it is where that does not show. */
export function shown(value: unknown): string {
  switch (typeof value) {
    case "number":
      return Object.is(value, -0) ? "-0" : String(value);
    case "bigint":
      return `${value}n`;
    case "string":
      return JSON.stringify(value);
    case "object":
      return value === null ? "null" : Array.isArray(value) ? "an array" : "an object";
    default:
      return `${String(value)} (${typeof value})`;
  }
}
