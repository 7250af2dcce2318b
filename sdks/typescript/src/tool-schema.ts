/** Tools: a name, what it does, and the JSON schema of what it takes. */
import { shown } from "./checks.js";
import { InvalidTool } from "./errors.js";
import type { Arguments } from "./tool-format.js";

/** A JSON schema. */
export type Schema = Readonly<Record<string, unknown>>;

/** Something that a model can call. `toolFrom` makes one of other definitions. A is the type of its arguments. */
export interface Tool<A = Arguments> {
  readonly name: string;
  readonly description: string;
  /** The JSON schema of an object. */
  readonly parameters: Schema;
  /** What `Tools.call` runs. */
  readonly function?: ((values: A) => unknown) | undefined;
}

/** What says its JSON schema itself, as schemas of some libraries do. */
export interface SaysSchema {
  toJSONSchema(): unknown;
}

/** A tool as users define it: `parameters` is a JSON schema, or an object that says one. */
export interface ToolDefinition<A = never> {
  readonly name?: string | undefined;
  readonly description?: string | null | undefined;
  readonly parameters?: Schema | SaysSchema | undefined;
  readonly input_schema?: Schema | undefined;
  readonly function?: unknown;
  readonly type?: string | undefined;
  /** What `Tools.call` runs. */
  readonly run?: ((values: A) => unknown) | undefined;
}

// A name is written as it is, between quotes or into markup.
const NAME = /^[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}$/;

/**
 * A tool of a definition: `{ name, description, parameters, run }`, or as the OpenAI or the Anthropic API has it.
 *
 * Throws InvalidTool for a name or a schema that is none.
 */
export function toolFrom<A>(given: ToolDefinition<A>): Tool<A> {
  const asked: unknown = given;
  if (!isObject(asked)) throw new InvalidTool("tool", `must be a definition, got ${shown(given)}`);
  const held: ToolDefinition<A> = isObject(given.function) ? given.function : given;
  const { name } = held;
  if (typeof name !== "string" || !NAME.test(name)) {
    throw new InvalidTool(
      "tool.name",
      `must be letters, digits and _ . : / - of ASCII, 128 at most, got ${shown(name)}`,
    );
  }
  const said: unknown = held.parameters ?? held.input_schema ?? { type: "object", properties: {} };
  const parameters: unknown = saysSchema(said) ? said.toJSONSchema() : said;
  if (!isObject(parameters) || (parameters["type"] ?? "object") !== "object") {
    throw new InvalidTool(`${name}.parameters`, `must be the schema of an object, got ${shown(parameters)}`);
  }
  const description = typeof held.description === "string" ? held.description : "";
  const run = given.run ?? held.run;
  return { name, description, parameters, ...(run === undefined ? {} : { function: run }) };
}

/** As chat templates take it, and the OpenAI chat API. */
export function schemaOf({ name, description, parameters }: Tool<never>): Record<string, unknown> {
  return { type: "function", function: { name, description, parameters } };
}

/** A tool's schema, in which an object that lists properties has no others unless it says that it may. */
export function closedParameters(tool: Tool<never>): Schema {
  return closed({ type: "object", properties: {}, ...tool.parameters }) as Schema;
}

function closed(schema: unknown): unknown {
  if (!isObject(schema)) return schema;
  const made: Record<string, unknown> = { ...schema };
  // What lies under allOf speaks of one object in several places, none of which knows all of it.
  for (const name of ["properties", "$defs", "definitions"]) {
    const held = made[name];
    if (isObject(held)) {
      made[name] = Object.fromEntries(Object.entries(held).map(([key, each]) => [key, closed(each)]));
    }
  }
  for (const name of ["anyOf", "oneOf", "prefixItems"]) {
    const held = made[name];
    if (Array.isArray(held)) made[name] = held.map(closed);
  }
  for (const name of ["items", "additionalProperties", "not"])
    if (isObject(made[name])) made[name] = closed(made[name]);
  const open = ["additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "$ref"];
  if (isObject(made["properties"]) && !open.some((name) => name in made)) made["additionalProperties"] = false;
  return made;
}

function saysSchema(value: unknown): value is SaysSchema {
  return typeof (value as Partial<SaysSchema> | null)?.toJSONSchema === "function";
}

export function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
