/**
 * The tokenizer of the served model, on this machine: what `client.tokenizer()` finds and checks.
 *
 * A server says a name and no folder, so the caches that hold models by name are looked into:
 *
 *     smollm2-135m    <Kakeya's cache>/models/smollm2-135m
 *     org/name        <the hub's cache>/models--org--name/snapshots/<commit of refs/main, or the only one>
 *
 * A name is never read as a path: what a server says opens nothing outside the two.
 */
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";

import type { ChatTokenizer } from "./chat-tokens.js";
import { TokenizerError } from "./errors.js";
import type { ServerInfo } from "./values.js";

const NAME = /^[A-Za-z0-9_][A-Za-z0-9_.-]*(\/[A-Za-z0-9_][A-Za-z0-9_.-]*)?$/;
const COMMIT = /^[0-9a-f]{40}$/;

/** given: a folder that has it; without one it is looked for. Throws TokenizerError. */
export async function servedTokenizer(
  served: ServerInfo,
  load: (folder: string) => Promise<ChatTokenizer>,
  given?: string,
): Promise<ChatTokenizer> {
  const folder = given ?? folderOf(served.modelId);
  const tokenizer = await load(folder).catch((cause: unknown) => {
    const files = given === undefined ? namesIn(folder) : [];
    const isGguf = files.some((name) => name.endsWith(".gguf")) && !files.includes("tokenizer.json");
    if (!isGguf || !(cause instanceof TokenizerError)) throw cause;
    throw new TokenizerError(
      `${cause.message}; kakeya models show ${served.modelId} makes one of its GGUF file, and says the folder for ` +
        "client.tokenizer(loadTokenizer, PATH)",
      { cause },
    );
  });
  const { eosTokenIds: ends, textTokens = 0 } = tokenizer;
  const ids = served.eosTokenIds;
  let problem: string | undefined;
  if (textTokens > served.vocabSize) {
    problem = `it has ${textTokens} tokens of text, and the model ${served.vocabSize} ids`;
  } else if (ends.length > 0 && ids.length > 0 && !ends.some((id) => ids.includes(id))) {
    problem = `texts end with ${ends.join(", ")} there, and with ${ids.join(", ")} on the server`;
  }
  if (problem === undefined) return tokenizer;
  throw new TokenizerError(
    `the tokenizer in ${folder} is not that of the server's model, ${served.modelId}: ${problem}; ` +
      "name another folder with client.tokenizer(loadTokenizer, PATH)",
  );
}

function folderOf(name: string): string {
  if (!NAME.test(name)) {
    throw new TokenizerError(
      `the server's model is ${JSON.stringify(name)}, which no cache of this machine has by name; name the folder that ` +
        "has its tokenizer with client.tokenizer(loadTokenizer, PATH)",
    );
  }
  const isOfHub = name.includes("/");
  const entry = join(hubCache(), `models--${name.replace("/", "--")}`);
  const folder = isOfHub ? snapshotIn(entry) : join(kakeyaCache(), "models", name);
  if (folder !== undefined && existsSync(folder)) return folder;
  throw new TokenizerError(
    `the server's model is ${name}, and its tokenizer is not in ${isOfHub ? join(entry, "snapshots") : folder}: fetch it ` +
      `(kakeya models fetch ${name}) or name the folder that has it with client.tokenizer(loadTokenizer, PATH)`,
  );
}

/** The folder of the commit that `main` is, as far as it was fetched; without one, the only one there. */
function snapshotIn(entry: string): string | undefined {
  const snapshots = join(entry, "snapshots");
  let commit = "";
  try {
    commit = readFileSync(join(entry, "refs", "main"), "ascii").trim();
  } catch {
    // There is no such branch here.
  }
  if (COMMIT.test(commit)) return join(snapshots, commit);
  const [first, ...others] = namesIn(snapshots).filter((name) => COMMIT.test(name));
  return first === undefined || others.length > 0 ? undefined : join(snapshots, first);
}

function namesIn(folder: string): string[] {
  try {
    return readdirSync(folder);
  } catch {
    return [];
  }
}

function kakeyaCache(): string {
  return inFull(variable("KAKEYA_CACHE_DIR") ?? `${variable("XDG_CACHE_HOME") ?? "~/.cache"}/kakeya`);
}

function hubCache(): string {
  const home = variable("HF_HOME") ?? `${variable("XDG_CACHE_HOME") ?? "~/.cache"}/huggingface`;
  const named = variable("HF_HUB_CACHE") ?? variable("HUGGINGFACE_HUB_CACHE") ?? `${home}/hub`;
  return inFull(
    named.replace(/\$(\w+|\{\w+\})/g, (all, name: string) => process.env[name.replace(/[{}]/g, "")] ?? all),
  );
}

/** One that is set to nothing is not set. */
function variable(name: string): string | undefined {
  return process.env[name] || undefined;
}

function inFull(path: string): string {
  return path.startsWith("~/") ? join(homedir(), path.slice(2)) : path;
}
