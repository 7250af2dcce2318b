/** What is published installs in an empty folder and works there, for programs and for compilers. */
import { execFileSync, type ExecFileSyncOptions } from "node:child_process";
import { mkdtempSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

import { afterAll, beforeAll, expect, inject, test } from "vitest";

const HERE = fileURLToPath(new URL("../", import.meta.url));
const DEPENDENCIES = ["@bufbuild/protobuf", "@connectrpc/connect", "@connectrpc/connect-node"];
let folder: string;

function run(command: string, args: string[], options: ExecFileSyncOptions = {}): string {
  return String(execFileSync(command, args, { cwd: folder, stdio: ["ignore", "pipe", "pipe"], ...options }));
}

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), "installed-"));
  run("npm", ["pack", "--silent", "--pack-destination", folder], { cwd: HERE });
  const tarball = readdirSync(folder).find((name) => name.endsWith(".tgz")) ?? "";
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

test("a strict compiler finds the types", () => {
  writeFileSync(
    join(folder, "typed.ts"),
    `import { Client, SessionBusy, type Strategy } from "@kakeya/runtime";
     import { tokensForChat, type ChatTokenizer } from "@kakeya/runtime/tokenization";
     const strategy: Strategy = { kind: "sink_window", window: 1024 };
     // @ts-expect-error an option of another strategy
     const wrong: Strategy = { kind: "sink_window", budget: 3 };
     export async function say(tokenizer: ChatTokenizer): Promise<bigint> {
       await using client = new Client();
       await using session = await client.createSession({ strategy });
       await session.append(tokensForChat([{ role: "user", content: "hi" }], tokenizer)).catch((error: unknown) => {
         if (!(error instanceof SessionBusy)) throw error;
       });
       for await (const id of session.generate(3, { seed: 1n })) console.log(id.toFixed(), wrong);
       return (await session.generate(3).result()).seed;
     }`,
  );
  const flags = ["--strict", "--target", "es2022", "--module", "node16"];
  const types = ["--types", "node", "--typeRoots", join(HERE, "node_modules", "@types"), "--noEmit"];
  // Libraries' types are checked, too: ours must hold by themselves.
  run(process.execPath, [join(HERE, "node_modules", "typescript", "bin", "tsc"), ...flags, ...types, "typed.ts"]);
});

test("publint and attw accept the package", () => {
  const bin = (name: string): string => join(HERE, "node_modules", ".bin", name);
  run(bin("publint"), ["--strict"], { cwd: HERE });
  run(bin("attw"), ["--pack", ".", "--profile", "esm-only", "--no-emoji"], { cwd: HERE });
});
