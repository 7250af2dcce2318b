/** The runtime's own server on a tiny model, in a process of its own, for all test files. */
import { spawn } from "node:child_process";
import { once } from "node:events";
import { connect } from "node:net";
import { createInterface } from "node:readline";

import type { TestProject } from "vitest/node";

import { PYTHON, ROOT } from "./python.mjs";

/** What a server is configured to be; settings as the runtime names them. */
export interface ServerSettings {
  readonly engine?: Readonly<Record<string, unknown>>;
  readonly server?: Readonly<Record<string, unknown>>;
  readonly guarded?: boolean;
}

export interface Opened {
  readonly target: string;
}

export interface Guarded extends Opened {
  readonly authority: string;
  /** Its certificate with the private key. */
  readonly certificate: string;
  readonly key: string;
}

/** Small, so that short appends already come in several requests. */
export const MAX_APPEND_TOKENS = 40;

declare module "vitest" {
  interface ProvidedContext {
    control: number;
    target: string;
  }
}

export default async function setup(project: TestProject): Promise<() => Promise<void>> {
  const process = spawn(PYTHON, ["-m", "tests.conformance.serve"], {
    cwd: ROOT,
    stdio: ["pipe", "pipe", "inherit"],
    env: { ...environment(), OMP_WAIT_POLICY: "PASSIVE", OMP_NUM_THREADS: "1" },
  });
  const ended = once(process, "exit");
  const lines = createInterface({ input: process.stdout });
  const port = await Promise.race([
    once(lines, "line").then(([line]) => Number(line)),
    ended.then(() => Promise.reject(new Error(`${PYTHON} -m tests.conformance.serve ended before it was ready`))),
  ]);
  project.provide("control", port);
  const end = async (): Promise<void> => {
    process.stdin.end();
    await ended;
  };
  try {
    const { target } = await openServer(port, {
      engine: { max_append_tokens: MAX_APPEND_TOKENS },
      server: { busy_wait_seconds: 0.5 },
    });
    project.provide("target", target);
  } catch (error) {
    await end();
    throw error;
  }
  return end;
}

/** Another server. */
export async function openServer<T extends Opened = Opened>(control: number, settings: ServerSettings): Promise<T> {
  return (await ask(control, { open: settings })) as T;
}

/** Let what runs on a server end, and end it. */
export async function drainServer(control: number, target: string): Promise<void> {
  await ask(control, { drain: target });
}

/** A proxy before servers that sends each call to one of them by its `kakeya-route`; as `tests/router.py` has it. */
export class Router {
  readonly target: string;
  readonly #control: number;

  private constructor(control: number, target: string) {
    this.#control = control;
    this.target = target;
  }

  static async before(control: number, targets: readonly string[]): Promise<Router> {
    return new Router(control, ((await ask(control, { router: targets })) as Opened).target);
  }

  /** Of the next call of each method, the answer is lost. */
  async lose(...methods: string[]): Promise<void> {
    await ask(this.#control, { lose: [this.target, methods] });
  }

  /** Method, route and server of each call until now. */
  async passed(): Promise<readonly [string, string | null, number][]> {
    const { calls } = (await ask(this.#control, { routed: this.target })) as {
      calls: [string, string | null, number][];
    };
    return calls;
  }
}

/** A server in a process of its own. */
export async function openProcess(control: number, flags: readonly string[] = []): Promise<string> {
  return ((await ask(control, { process: flags })) as Opened).target;
}

/** By SIGKILL. */
export async function killProcess(control: number, target: string): Promise<void> {
  await ask(control, { kill: target });
}

/** Again, at its address, after it was killed. */
export async function startProcess(control: number, target: string): Promise<void> {
  await ask(control, { start: target });
}

/** What a server counts, by the names of its metrics; over all labels. */
export async function statisticsOf(control: number, target: string): Promise<Record<string, number>> {
  return (await ask(control, { census: target })) as Record<string, number>;
}

/** What becomes of a call that passes a middle, and when; as `tests/middle.py` has it. */
export interface Fate {
  readonly when: "request" | "answer" | "headers" | "messages" | "done" | "trailers";
  readonly what: "cut" | "close" | "hold" | "delay" | "reset";
  readonly messages?: number;
  readonly seconds?: number;
  readonly code?: number;
}

/** In front of a server, and speaks HTTP/2: it cuts, delays and holds the calls that pass it. */
export class Middle {
  readonly target: string;
  readonly #control: number;

  private constructor(control: number, target: string) {
    this.#control = control;
    this.target = target;
  }

  static async before(control: number, target: string): Promise<Middle> {
    const opened = (await ask(control, { middle: target })) as Opened;
    return new Middle(control, opened.target);
  }

  /** The fates of the next calls, in their order. */
  async expect(...fates: Fate[]): Promise<void> {
    await ask(this.#control, { fates: [this.target, fates] });
  }

  /** Nothing passes any more. */
  async darken(): Promise<void> {
    await ask(this.#control, { darken: this.target });
  }

  /** What came to it until now, and how many calls met their fate. */
  async passed(): Promise<{ connections: number; calls: number; acted: number }> {
    return (await ask(this.#control, { passed: this.target })) as { connections: number; calls: number; acted: number };
  }
}

/** Every reason the server can give, with the name of its status code. */
export async function serverReasons(control: number): Promise<Record<string, string>> {
  return ((await ask(control, { reasons: true })) as { reasons: Record<string, string> }).reasons;
}

async function ask(control: number, question: unknown): Promise<unknown> {
  const socket = connect(control, "127.0.0.1");
  socket.write(`${JSON.stringify(question)}\n`);
  let answer = "";
  for await (const bytes of socket) answer += String(bytes);
  if (answer === "")
    throw new Error(`the servers' process could not do ${JSON.stringify(question)}; it says why above`);
  return JSON.parse(answer);
}

/** Ours without KAKEYA_… settings, which are the tester's own. */
function environment(): Record<string, string> {
  const entries = Object.entries(globalThis.process.env).filter(([name]) => !name.startsWith("KAKEYA_"));
  return Object.fromEntries(entries) as Record<string, string>;
}
