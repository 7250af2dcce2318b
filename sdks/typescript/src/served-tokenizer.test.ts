/** `client.tokenizer()`, in the cases that Python has, too: what it finds on this machine, checks and says. */
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";

import { afterEach, beforeEach, expect, test, vi } from "vitest";

import { failure } from "../testing/moves.js";
import { ROOT } from "../testing/python.mjs";
import { scripted, type Scripted } from "../testing/scripted.js";
import { Client, TokenizerError } from "./index.js";
import { loadTokenizer } from "./tokenization.js";

interface Case {
  readonly name: string;
  readonly model: string;
  readonly vocab_size?: number;
  readonly ends?: number[];
  /** Folders with the tokenizer, and without. */
  readonly holds?: string[];
  readonly bare?: string[];
  readonly gguf?: string;
  readonly main?: string;
  readonly path?: string;
  readonly error?: string[];
}

const FILE = JSON.parse(readFileSync(join(ROOT, "tests", "conformance", "served_tokenizers.json"), "utf8")) as {
  readonly tokenizer: Record<string, object>;
  readonly cases: Case[];
};

let folder: string;
let server: Scripted | undefined;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), "caches-"));
});
afterEach(async () => {
  vi.unstubAllEnvs();
  rmSync(folder, { recursive: true });
  await server?.close();
});

/** With whole commits. */
function at(place: string): string {
  return join(folder, place.replace("AAAA", "a".repeat(40)).replace("BBBB", "b".repeat(40)));
}

function write(path: string, text: string): void {
  mkdirSync(dirname(path), { recursive: true });
  writeFileSync(path, text);
}

function put({ holds = [], bare = [], gguf, main }: Partial<Case>): void {
  for (const place of bare) mkdirSync(at(place), { recursive: true });
  for (const place of holds) {
    for (const [name, content] of Object.entries(FILE.tokenizer)) write(join(at(place), name), JSON.stringify(content));
  }
  if (gguf !== undefined) write(at(gguf), "");
  if (main !== undefined) write(join(folder, "hub", "models--org--small", "refs", "main"), `${at(main).slice(-40)}\n`);
}

test.each(FILE.cases)("$name: the tokenizer is found, or the error says how", async (one) => {
  put(one);
  vi.stubEnv("KAKEYA_CACHE_DIR", join(folder, "kakeya"));
  vi.stubEnv("HF_HUB_CACHE", join(folder, "hub"));
  const served = { modelId: one.model, vocabSize: one.vocab_size ?? 4, eosTokenIds: one.ends ?? [2, 3] };
  server = await scripted({ getServerInfo: () => served });
  await using client = new Client(server.target);
  const asked = client.tokenizer(loadTokenizer, one.path === undefined ? undefined : at(one.path));
  if (one.error === undefined) expect((await asked).encode("cab<end>")).toEqual([2, 0, 1, 3]);
  else {
    const { message } = await failure(TokenizerError, asked);
    // As a call is written here.
    const here = message.replaceAll("(loadTokenizer, ", "(");
    expect(one.error.filter((words) => !here.includes(words))).toEqual([]);
  }
});

test.each([
  ["XDG_CACHE_HOME", "huggingface/hub"],
  ["HF_HOME", "hub"],
  ["HOME", ".cache/huggingface/hub"],
])("caches are where %s says", async (variable, below) => {
  const variables = ["KAKEYA_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"];
  for (const name of variables) vi.stubEnv(name, undefined);
  vi.stubEnv(variable, folder);
  put({ holds: [`${below}/models--org--small/snapshots/AAAA`] });
  server = await scripted({ getServerInfo: () => ({ modelId: "org/small", vocabSize: 4 }) });
  await using client = new Client(server.target);
  expect((await client.tokenizer(loadTokenizer)).encode("ab")).toEqual([0, 1]);
});
