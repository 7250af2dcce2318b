/** What is published installs in an empty folder and works there, for programs and for compilers. */
import { execFileSync, type ExecFileSyncOptions } from "node:child_process";
import { cpSync, mkdtempSync, readdirSync, readFileSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

import ts from "typescript";
import { build } from "vite";
import { afterAll, beforeAll, expect, inject, test } from "vitest";

import { PYTHON, ROOT } from "../testing/python.mjs";
import { openServer } from "../testing/servers.js";

const HERE = fileURLToPath(new URL("../", import.meta.url));
const DEPENDENCIES = ["@bufbuild/protobuf", "@connectrpc/connect", "@connectrpc/connect-node"];
const ESNEXT = ts.ModuleKind.ESNext;
const COPIED = { recursive: true, dereference: true };
let folder: string;
let tarball: string;

function run(command: string, args: string[], options: ExecFileSyncOptions = {}): string {
  return String(execFileSync(command, args, { cwd: folder, stdio: ["ignore", "pipe", "pipe"], ...options }));
}

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), "installed-"));
  run("npm", ["pack", "--silent", "--pack-destination", folder], { cwd: HERE });
  tarball = readdirSync(folder).find((name) => name.endsWith(".tgz")) ?? "";
  // What it depends on comes from here, so that nothing is asked of a registry.
  const here = DEPENDENCIES.map((name): [string, string] => [name, `file:${join(HERE, "node_modules", name)}`]);
  const dependencies = { "@kakeya/runtime": `file:${tarball}`, ...Object.fromEntries(here) };
  writeFileSync(join(folder, "package.json"), JSON.stringify({ type: "module", private: true, dependencies }));
  run("npm", ["install", "--offline", "--install-links", "--no-audit", "--no-fund"]);
});
afterAll(() => {
  rmSync(folder, { recursive: true });
});

test("a program runs a session, and ends although it closes nothing", () => {
  writeFileSync(
    join(folder, "program.mjs"),
    `import { Client } from "@kakeya/runtime";
     const session = await new Client("${inject("target")}").createSession();
     await session.append([1, 2, 3]);
     console.log((await session.generate(4).result()).tokenIds.length);`,
  );
  expect(run(process.execPath, ["program.mjs"], { timeout: 30_000 })).toBe("4\n");
});

test.each([
  ["a loop that was left", "for await (const id of session.generate(30_000)) break;"],
  ["a stream that was cancelled unread", "session.generate(30_000).cancel();"],
])("a program ends after %s, however long the stream might have taken", (_, leaving) => {
  writeFileSync(
    join(folder, "leaving.mjs"),
    `import { Client } from "@kakeya/runtime";
     const session = await new Client("${inject("target")}").createSession({
       strategy: { kind: "sink_window", window: 32 },
     });
     await session.append([1, 2, 3]);
     ${leaving}
     while ((await session.info()).isGenerating);
     console.log("left");`,
  );
  expect(run(process.execPath, ["leaving.mjs"], { timeout: 30_000 })).toBe("left\n");
});

test("without the tokenizers' packages, the tokenization says what to install when it is used", () => {
  writeFileSync(
    join(folder, "tokens.mjs"),
    `import { fromOpenAIMessages, loadTokenizer } from "@kakeya/runtime/tokenization";
     console.log(fromOpenAIMessages([{ role: "user", content: "hi" }])[0].content);
     await loadTokenizer(".").catch((error) => console.log(error.name, error.message));`,
  );
  const [content, problem] = run(process.execPath, ["tokens.mjs"]).split("\n");
  expect(content).toBe("hi");
  expect(problem).toContain("TokenizerError");
  expect(problem).toContain("npm install @huggingface/tokenizers @huggingface/jinja");
});

test("a program that requires the package runs a session, with the names that one has that imports it", () => {
  writeFileSync(
    join(folder, "program.cjs"),
    `const { Client, InvalidArgument } = require("@kakeya/runtime");
     const { fromOpenAIMessages, loadTokenizer } = require("@kakeya/runtime/tokenization");
     (async () => {
       const session = await new Client("${inject("target")}").createSession();
       await session.append([1, 2, 3]);
       console.log((await session.generate(4).result()).tokenIds.length);
       console.log(await session.append([-1]).catch((error) => error instanceof InvalidArgument));
       console.log(fromOpenAIMessages([{ role: "user", content: "hi" }])[0].content);
       console.log((await loadTokenizer(".").catch((error) => error)).name);
       const imported = await Promise.all([import("@kakeya/runtime"), import("@kakeya/runtime/tokenization"), import("@kakeya/runtime/tools")]);
       const required = [require("@kakeya/runtime"), require("@kakeya/runtime/tokenization"), require("@kakeya/runtime/tools")];
       console.log(...required.map((each, at) => Object.keys(each).sort().join() === Object.keys(imported[at]).join()));
     })();`,
  );
  expect(run(process.execPath, ["program.cjs"], { timeout: 30_000 })).toBe(
    "4\ntrue\nhi\nTokenizerError\ntrue true true\n",
  );
});

const TYPED = `
  import { Client, SessionBusy, type Strategy } from "@kakeya/runtime";
  import { tokensForChat, type ChatTokenizer } from "@kakeya/runtime/tokenization";
  import { Tools } from "@kakeya/runtime/tools";
  export const named = (tokenizer: ChatTokenizer): string => new Tools([{ name: "now" }], tokenizer).constraint("now").grammar;
  const strategy: Strategy = { kind: "sink_window", window: 1024 };
  // @ts-expect-error an option of another strategy
  const wrong: Strategy = { kind: "sink_window", budget: 3 };
  // @ts-expect-error an option of another name
  export const stray = new Client("127.0.0.1:1", { timeout: 3 });
  export async function say(tokenizer: ChatTokenizer): Promise<bigint> {
    await using client = new Client();
    await using session = await client.createSession({ strategy });
    await session.append(tokensForChat([{ role: "user", content: "hi" }], tokenizer)).catch((error: unknown) => {
      if (!(error instanceof SessionBusy)) throw error;
    });
    const ids: [number, Strategy][] = [];
    for await (const id of session.generate(3, { seed: 1n })) ids.push([id, wrong]);
    return (await session.generate(3).result()).seed;
  }`;
const NODE = ["--types", "node", "--typeRoots", join(HERE, "node_modules", "@types")];
// A signal has a type only where something declares it.
const SIGNALLED = `${TYPED}
  export const stopped = (client: Client, signal: AbortSignal) => client.serverInfo({ signal });`;

test.each<[string, string, string, string[]]>([
  ["ES modules, Node's types", "typed.ts", SIGNALLED, ["--module", "node16", ...NODE]],
  ["ES modules, no types but the language's own", "bare.ts", TYPED, ["--module", "nodenext"]],
  ["CommonJS of Node's", "typed.cts", SIGNALLED, ["--module", "node16", ...NODE]],
  ["CommonJS as it was", "old.cts", TYPED, ["--module", "commonjs", "--moduleResolution", "node10"]],
])("a strict compiler finds the types without a browser's: %s", (_, name, source, flags) => {
  writeFileSync(join(folder, name), source);
  // Libraries' types are checked, too: ours must hold by themselves.
  const strict = ["--strict", "--exactOptionalPropertyTypes", "--target", "es2022", "--lib", "es2022", "--noEmit"];
  run(process.execPath, [join(HERE, "node_modules", "typescript", "bin", "tsc"), ...strict, ...flags, name]);
});

test.each(["es", "cjs"] as const)(
  "bundled into one short file, as for Electron's main process, it runs: %s",
  async (format) => {
    writeFileSync(
      join(folder, "bundled.mjs"),
      `import * as kakeya from "@kakeya/runtime";
     async function main() {
       await using client = new kakeya.Client("${inject("target")}");
       const session = await client.createSession();
       await session.append([1, 2, 3]);
       console.log((await session.generate(4).result()).tokenIds.length);
       const failed = [() => session.append([-1]), () => client.session("x"), () => client.createSession({ a: 1 })];
       for (const call of failed) await call().catch((error) => console.log(error.name, error instanceof kakeya.CallerError));
       const kinds = Object.entries(kakeya).filter(([, kind]) => kind.prototype instanceof kakeya.KakeyaError);
       const facts = { historyLength: 0, pendingTokens: 0 };
       const named = kinds.filter(([name, kind]) => new kind(new Error("why"), facts).name === name);
       console.log(kinds.length > 30, kinds.length === named.length);
     }
     main();`,
    );
    const out = join(folder, format);
    await build({
      root: folder,
      logLevel: "error",
      configFile: false,
      ssr: { noExternal: true },
      build: { ssr: "bundled.mjs", minify: "esbuild", outDir: out, rollupOptions: { output: { format } } },
    });
    const [file = ""] = readdirSync(out);
    const moved = mkdtempSync(join(tmpdir(), "bundle-"));
    try {
      // Away from what is installed, and so from what it might still import.
      cpSync(join(out, file), join(moved, `app.${format === "es" ? "mjs" : "cjs"}`));
      const said = run(process.execPath, readdirSync(moved), { cwd: moved, timeout: 30_000 });
      expect(said).toBe("4\nInvalidTokenIds true\nSessionNotFound true\nInvalidArgument true\ntrue true\n");
    } finally {
      rmSync(moved, { recursive: true });
    }
  },
);

test("the examples run where what their text names is installed, and nothing else", async () => {
  const examples = join(HERE, "examples");
  const names = readdirSync(examples).filter((name) => name.endsWith(".ts") && !name.endsWith(".test.ts"));
  const tokenizers = join(folder, "tokenizers");
  execFileSync(PYTHON, ["-m", "tests.conformance.save_tokenizers", tokenizers], { cwd: ROOT });
  const { target } = await openServer(inject("control"), { engine: { strategy: "sink_window:sink=4,window=64" } });
  // FOLDER and TARGET are the reader's to fill in.
  const given: Record<string, string> = { "[FOLDER]": join(tokenizers, "ChatML"), "[TARGET]": target };
  const printed = names.map((name) => {
    const text = readFileSync(join(examples, name), "utf8");
    const needed = /npm install (@[\w/@ -]+)/.exec(text)?.[1]?.split(" ") ?? [];
    const where = mkdtempSync(join(folder, "example-"));
    cpSync(join(folder, "node_modules"), join(where, "node_modules"), { recursive: true });
    for (const each of needed) cpSync(join(HERE, "node_modules", each), join(where, "node_modules", each), COPIED);
    writeFileSync(join(where, "package.json"), JSON.stringify({ type: "module" }));
    const compiled = ts.transpileModule(text, { compilerOptions: { target: ts.ScriptTarget.ES2022, module: ESNEXT } });
    writeFileSync(join(where, name.replace(".ts", ".js")), compiled.outputText);
    const [, command = ""] = /node ([\w-]+\.js .*)/.exec(text) ?? [];
    const words = command.replace(/ +#.*/, "").match(/"[^"]*"|\S+/g) ?? [];
    const args = words.map((each) => given[each] ?? each.replaceAll('"', ""));
    try {
      return run(process.execPath, args, { cwd: where, timeout: 60_000 });
    } catch (error) {
      // TinyModel's tokens are not this tokenizer's, so the agent can be right to end with what it could not read.
      return String((error as { stdout?: unknown }).stdout);
    }
  });
  expect(names).toEqual(["minimal-session.ts", "tool-calling-agent.ts"]);
  expect(printed[0]).toContain("22 tokens in the history");
  expect(printed[1]).toContain("user   What is 30 + 12?");
});

test("the Electron example is built in a folder of its own, and its main process's part speaks", async () => {
  const example = join(folder, "examples", "electron");
  cpSync(join(HERE, "examples", "electron"), example, {
    recursive: true,
    filter: (path) => !/node_modules|dist$|\.test\.ts$/.test(path.slice(HERE.length)),
  });
  cpSync(join(HERE, "tsconfig.json"), join(folder, "tsconfig.json"));
  cpSync(join(folder, "node_modules"), join(example, "node_modules"), { recursive: true });
  for (const name of ["electron", "@types", "@huggingface"]) {
    symlinkSync(join(HERE, "node_modules", name), join(example, "node_modules", name));
  }
  const PATH = `${join(HERE, "node_modules", ".bin")}:${process.env["PATH"] ?? ""}`;
  run("npm", ["run", "--silent", "build"], { cwd: example, env: { ...process.env, PATH } });
  const built = ["chat.js", "conversation.js", "main.js", "page.js", "preload.cjs", "protocol.js", "text-stream.js"];
  expect(readdirSync(join(example, "dist")).sort()).toEqual(built);
  // All of the main process but windows: what needs Electron is in main.js alone.
  const { target } = await openServer(inject("control"), { engine: { strategy: "sink_window:sink=4,window=64" } });
  execFileSync(PYTHON, ["-m", "tests.conformance.save_tokenizers", join(folder, "tokenizers")], { cwd: ROOT });
  writeFileSync(
    join(example, "speak.mjs"),
    `import { once } from "node:events";
     import { MessageChannel } from "node:worker_threads";
     import { Client } from "@kakeya/runtime";
     import { loadTokenizer } from "@kakeya/runtime/tokenization";
     import { Conversation } from "./dist/conversation.js";
     const { port1, port2 } = new MessageChannel();
     const port = { send: (report) => port1.postMessage(report), onMessage: (listener) => port1.on("message", listener) };
     const session = await new Client("${target}").createSession();
     const tokenizer = await loadTokenizer("${join(folder, "tokenizers", "ChatML")}");
     await Conversation.over(port, session, tokenizer, { maxTokens: 8, temperature: 0 });
     port2.postMessage({ kind: "say", text: "Hello!" });
     const kinds = new Set();
     while (!kinds.has("end") && !kinds.has("failed")) kinds.add((await once(port2, "message"))[0].kind);
     console.log(...kinds);
     port1.close();`,
  );
  expect(run(process.execPath, ["speak.mjs"], { cwd: example, timeout: 30_000 }).trim()).toMatch(/^ready .*end$/);
});

test("every dependency comes from a registry, or from this repository", () => {
  const locked = JSON.parse(readFileSync(join(HERE, "package-lock.json"), "utf8")) as {
    packages: Record<string, { version?: string; integrity?: string }>;
  };
  const { dependencies, peerDependencies } = JSON.parse(readFileSync(join(HERE, "package.json"), "utf8")) as Record<
    string,
    Record<string, string>
  >;
  for (const name of Object.keys({ ...dependencies, ...peerDependencies })) {
    // A name with a checksum is one that a registry gave us.
    expect(locked.packages[`node_modules/${name}`]?.integrity, name).toMatch(/^sha512-/);
  }
  const electron = JSON.parse(readFileSync(join(HERE, "examples", "electron", "package.json"), "utf8")) as {
    dependencies: Record<string, string>;
  };
  expect(electron.dependencies["@kakeya/runtime"]).toBe("file:../..");
});

test("publint and attw accept the package", () => {
  const bin = (name: string): string => join(HERE, "node_modules", ".bin", name);
  run(bin("publint"), [tarball, "--strict"]);
  run(bin("attw"), [tarball, "--profile", "node16", "--no-emoji"]);
});
