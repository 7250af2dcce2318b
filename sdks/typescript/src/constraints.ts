/** Constraints as plain values: what the tokens of one Generate must spell. Each is `{ kind, … }`, as its arm on the wire. */
import { create } from "@bufbuild/protobuf";

import { invalid, shown, textOf, tokenIdsOf, type TokenIds } from "./checks.js";
import { ConstraintSchema, type Constraint as WireConstraint } from "./generated/kakeya/v1/runtime_pb.js";

/**
 * JSON that fits a schema, given as an object or as JSON text.
 *
 * Written as Python's `json.dumps` writes it, with keys in the order of "properties"; "x-guidance" in the schema changes
 * that.
 */
export interface JsonSchema {
  readonly kind: "json_schema";
  readonly schema: Readonly<Record<string, unknown>> | string;
}

/** Text that a regular expression matches from its beginning to its end, in Rust's syntax without look-around. */
export interface Regex {
  readonly kind: "regex";
  readonly pattern: string;
}

/** Text that fits a grammar, in the variant of Lark's syntax that llguidance documents. */
export interface Lark {
  readonly kind: "lark";
  readonly grammar: string;
}

/** One of several lists of token ids. The server needs no tokenizer for it. */
export interface Choice {
  readonly kind: "choice";
  readonly choices: Iterable<TokenIds>;
}

/** What the tokens of one Generate must spell. */
export type Constraint = JsonSchema | Regex | Lark | Choice;

/**
 * The constraint as it goes on the wire. Throws InvalidArgument for what protobuf would take wrongly.
 *
 * @internal
 */
export function constraintToWire(constraint: Constraint): WireConstraint {
  const given: unknown = constraint;
  const kind: unknown = typeof given === "object" && given !== null && "kind" in given ? given.kind : given;
  switch (kind) {
    case "json_schema":
      return create(ConstraintSchema, { kind: { case: "jsonSchema", value: schemaOf((given as JsonSchema).schema) } });
    case "regex":
      return create(ConstraintSchema, {
        kind: { case: "regex", value: textOf((given as Regex).pattern, "constraint.pattern") },
      });
    case "lark":
      return create(ConstraintSchema, {
        kind: { case: "lark", value: textOf((given as Lark).grammar, "constraint.grammar") },
      });
    case "choice":
      return create(ConstraintSchema, { kind: { case: "choice", value: { choices: choicesOf(given as Choice) } } });
    default:
      throw invalid(
        "constraint",
        `must be an object whose kind is one of json_schema, regex, lark, choice; got ${shown(kind)}`,
      );
  }
}

function schemaOf(schema: unknown): string {
  if (typeof schema === "string") return textOf(schema, "constraint.schema");
  if (typeof schema !== "object" || schema === null || Array.isArray(schema)) {
    throw invalid("constraint.schema", `must be an object or JSON text, got ${shown(schema)}`);
  }
  try {
    return textOf(JSON.stringify(schema), "constraint.schema");
  } catch (error) {
    throw invalid("constraint.schema", `is no JSON: ${error instanceof Error ? error.message : String(error)}`);
  }
}

function choicesOf({ choices }: Choice): { tokenIds: number[] }[] {
  const given: unknown = choices;
  if (typeof given !== "object" || given === null || !(Symbol.iterator in given)) {
    throw invalid("constraint.choices", `must be lists of token ids, got ${shown(choices)}`);
  }
  return Array.from(choices, (ids, place) => ({ tokenIds: tokenIdsOf(ids, `constraint.choices[${place}]`) }));
}
