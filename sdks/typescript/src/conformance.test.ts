/**
 * The scenarios that every SDK plays step by step: what is seen here is what is expected, and what Python sees.
 *
 * The words of tests/conformance/scenarios.json are explained in scenarios.py beside it.
 */
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { join } from "node:path";

import { afterAll, beforeAll, describe, expect, inject, test } from "vitest";

import { PYTHON, ROOT } from "../testing/python.mjs";
import { openServer, type ServerSettings } from "../testing/servers.js";
import {
  Client,
  InvalidArgument,
  KakeyaError,
  type GenerateOptions,
  type Progress,
  type Session,
  type Strategy,
} from "./index.js";

type Seen = Record<string, unknown>;

interface Step {
  readonly do: "append" | "close" | "create" | "fork" | "generate" | "info" | "prefill" | "rewind" | "server_info";
  readonly session: string;
  readonly of?: string;
  readonly position?: number;
  readonly strategy?: Seen;
  readonly token_ids?: unknown;
  readonly max_tokens?: number;
  readonly leave_after?: number;
  readonly options?: Seen;
  readonly as?: string;
  readonly expect?: Seen;
  readonly observe?: readonly string[];
  readonly meanwhile?: Step & { readonly after_seconds: number };
}

interface Scenarios {
  readonly server: ServerSettings;
  readonly scenarios: readonly { readonly name: string; readonly steps: readonly Step[] }[];
}

const FILE = JSON.parse(readFileSync(join(ROOT, "tests", "conformance", "scenarios.json"), "utf8")) as Scenarios;
// Less than any wait that a server asks for.
const PATIENCE_SECONDS = 0.5;
// Not facts of the session but of the clock, and what depends on other clients of the server.
const LEFT_OUT = [
  "idleSeconds",
  "prefillSeconds",
  "totalSeconds",
  "kvReservedBytes",
  "tierReservedBytes",
  "historyTokens",
  "usage",
  "version",
];
// What Python has as a property, beside its values.
const DERIVED = ["generatedTokens"];
const SESSION_FACTS = [
  "strategy",
  "sustainedBytes",
  "reservedBytes",
  "peakBytes",
  "tierBytes",
  "limitTokens",
  "mode",
  "modelId",
] as const;

// Constraints, by the name of what they hold.
const KINDS: Record<string, string> = { schema: "json_schema", pattern: "regex", grammar: "lark", choices: "choice" };

let client: Client;
let python: Record<string, Seen[]>;
beforeAll(async () => {
  const { target } = await openServer(inject("control"), FILE.server);
  client = new Client(target, { retry: { patienceSeconds: PATIENCE_SECONDS } });
  const command = ["-m", "tests.conformance.python_runner", target];
  python = JSON.parse(execFileSync(PYTHON, command, { cwd: ROOT, encoding: "utf8" })) as Record<string, Seen[]>;
});
afterAll(async () => {
  await client.close();
});

describe.each(FILE.scenarios)("$name", ({ name, steps }) => {
  test("is seen as it is written, and as Python sees it", async () => {
    const player = new Player();
    try {
      const story = await player.play(steps);
      expect(story).toEqual(python[name]);
    } finally {
      await player.close();
    }
  });
});

class Player {
  readonly #sessions = new Map<string, Session>();
  readonly #tokens = new Map<string, readonly number[]>();

  async play(steps: readonly Step[]): Promise<Seen[]> {
    const story: Seen[] = [];
    for (const step of steps) {
      const meanwhile = this.#meanwhile(step.meanwhile);
      const seen = await this.#seen(step);
      await meanwhile;
      const expected = this.#resolved(step.expect ?? {}) as Seen;
      expect(seen, JSON.stringify(step)).toMatchObject(expected);
      const kept = step.observe === undefined ? Object.keys(seen) : step.observe;
      story.push(Object.fromEntries(kept.map((key) => [key, seen[key]])));
    }
    return story;
  }

  async close(): Promise<void> {
    for (const session of this.#sessions.values()) await session.close();
  }

  async #meanwhile(step: Step["meanwhile"]): Promise<void> {
    if (step === undefined) return;
    await new Promise((resolve) => setTimeout(resolve, step.after_seconds * 1000));
    await this.#seen(step);
  }

  async #seen(step: Step): Promise<Seen> {
    const options = camelCased(this.#resolved(step.options ?? {})) as Seen;
    try {
      return await this.#do(step, options);
    } catch (error) {
      if (error instanceof KakeyaError) return described(error);
      throw error;
    }
  }

  async #do(step: Step, options: Seen): Promise<Seen> {
    switch (step.do) {
      case "server_info":
        return factsOf(await client.serverInfo());
      case "create": {
        const session = await client.createSession({ strategy: strategyOf(step.strategy), ...options });
        this.#sessions.set(step.session, session);
        return sessionFacts(session);
      }
      case "fork": {
        const session = await this.#session(step.of ?? "").fork(options);
        this.#sessions.set(step.session, session);
        return { ...sessionFacts(session), history_length: session.historyLength };
      }
      case "rewind": {
        const old = this.#session(step.session);
        const session = await old.rewind(step.position ?? 0, options);
        this.#sessions.set(step.session, session);
        return {
          ...sessionFacts(session),
          history_length: session.historyLength,
          prefill_tokens: session.prefillTokens,
          is_another: session.id !== old.id,
          old_is_closed: old.isClosed,
        };
      }
      case "append": {
        const ids = this.#resolved(step.token_ids) as number[];
        return { history_length: await this.#session(step.session).append(ids, options) };
      }
      case "generate":
        return await this.#generate(step, options);
      case "prefill":
        return await this.#prefill(step, options);
      case "info":
        return factsOf(await this.#session(step.session).info());
      case "close":
        return { history_length: await this.#session(step.session).close() };
    }
  }

  async #generate(step: Step, options: Seen): Promise<Seen> {
    const session = this.#session(step.session);
    const given: GenerateOptions = {
      ...options,
      ...(options["seed"] === undefined ? {} : { seed: BigInt(options["seed"] as string) }),
      ...(options["logitBias"] === undefined
        ? {}
        : {
            logitBias: new Map(
              Object.entries(options["logitBias"] as Record<string, number>).map(([id, bias]) => [Number(id), bias]),
            ),
          }),
    };
    const asked = options["constraint"] as Record<string, unknown> | undefined;
    if (asked !== undefined) {
      const kind = KINDS[Object.keys(asked)[0] ?? ""];
      const lists = asked["choices"];
      const said = typeof lists === "object" && lists !== null ? { choices: Object.values(lists) } : asked;
      (given as { constraint?: unknown }).constraint = { kind, ...said };
    }
    const stream = session.generate(step.max_tokens ?? 0, given);
    if (step.leave_after !== undefined) {
      const ids: number[] = [];
      for await (const id of stream) if (ids.push(id) === step.leave_after) break;
      return { token_ids: ids };
    }
    const result = await stream.result();
    this.#tokens.set(step.as ?? "", result.tokenIds);
    // A seed that the server drew is another each time.
    const seed = given.seed === undefined ? null : String(result.seed);
    return { ...factsOf(result), seed, session_history_length: session.historyLength };
  }

  async #prefill(step: Step, options: Seen): Promise<Seen> {
    const session = this.#session(step.session);
    let progress: number[] | null = null;
    const onProgress = (one: Progress): void => {
      progress = [one.doneTokens, one.totalTokens];
    };
    const result = await session.prefill({ ...options, onProgress });
    return { ...factsOf(result), seed: null, progress, session_history_length: session.historyLength };
  }

  #session(name: string): Session {
    const session = this.#sessions.get(name);
    if (session === undefined) throw new Error(`no step has made a session ${name}`);
    return session;
  }

  /** `value` with everything in it that stands for tokens replaced by them. */
  #resolved(value: unknown): unknown {
    if (Array.isArray(value)) return value.flatMap((each) => this.#resolved(each));
    if (typeof value !== "object" || value === null) return value;
    const { all_of, of, at, repeat, times } = value as Record<string, unknown>;
    if (all_of !== undefined) return this.#tokens.get(all_of as string);
    if (of !== undefined) return this.#tokens.get(of as string)?.[at as number];
    if (repeat !== undefined) return new Array<unknown>(times as number).fill(repeat).flat();
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, this.#resolved(each)]));
  }
}

/** An error as its reader sees it. Words found on this side of the wire are each SDK's own. */
function described(error: KakeyaError): Seen {
  return {
    error: error.name,
    reason: error.reason ?? null,
    code: error.code ?? null,
    field: error instanceof InvalidArgument ? (error.field ?? null) : null,
    metadata: error.metadata,
    message: error.reason === undefined ? null : error.message,
    appended_tokens: error.appendedTokens ?? null,
    retry_after_seconds: error.retryAfterSeconds ?? null,
  };
}

/** Options of a named strategy keep the server's names. */
function strategyOf(words: Seen | undefined): Strategy | undefined {
  return (words?.["kind"] === "named" ? words : camelCased(words)) as Strategy | undefined;
}

function sessionFacts(session: Session): Seen {
  return factsOf(Object.fromEntries(SESSION_FACTS.map((name) => [name, session[name]])));
}

/** In the words of Python: snake case, None for what is not there. */
function factsOf(value: object): Seen {
  const entries = Object.entries(value).filter(([name]) => ![...LEFT_OUT, ...DERIVED].includes(name));
  return snakeCased(Object.fromEntries(entries)) as Seen;
}

function snakeCased(value: unknown): unknown {
  if (value === undefined) return null;
  return renamed(value, (name) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`), snakeCased);
}

function camelCased(value: unknown): unknown {
  return renamed(value, (name) => name.replace(/_[a-z]/g, (pair) => pair.slice(1).toUpperCase()), camelCased);
}

function renamed(value: unknown, name: (key: string) => string, inner: (value: unknown) => unknown): unknown {
  if (Array.isArray(value)) return value.map(inner);
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [name(key), inner(each)]));
}
