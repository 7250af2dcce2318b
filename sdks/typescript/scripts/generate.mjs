// Generates the code of the wire contract, or checks that the files in src/generated are current.
//
//     node scripts/generate.mjs            writes them
//     node scripts/generate.mjs --check    writes nothing; exits with 1 and names every file that differs
//
// google/rpc has no package of its own in TypeScript: what errors carry is generated beside our own messages.
import { execFileSync } from "node:child_process";
import { cpSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, relative } from "node:path";
import { fileURLToPath } from "node:url";

import { PYTHON, ROOT } from "../testing/python.mjs";

const CONTRACTS = ["kakeya/v1/runtime.proto", "google/rpc/error_details.proto"];
const here = fileURLToPath(new URL("../", import.meta.url));
const held = join(here, "src", "generated");

const fresh = mkdtempSync(join(tmpdir(), "generated-"));
try {
  const googleApis = execFileSync(PYTHON, ["-c", "import google.rpc as rpc; print(rpc.__path__[0])"], {
    encoding: "utf8",
  });
  const flags = [
    `--plugin=${join(here, "node_modules", ".bin", "protoc-gen-es")}`,
    `--proto_path=${join(ROOT, "proto")}`,
    `--proto_path=${join(googleApis.trim(), "..", "..")}`,
    `--es_out=target=ts,import_extension=js:${fresh}`,
  ];
  execFileSync(PYTHON, ["-m", "grpc_tools.protoc", ...flags, ...CONTRACTS], { stdio: "inherit" });
  if (process.argv.includes("--check")) {
    const names = new Set([...files(fresh), ...files(held)]);
    const stale = [...names].filter((name) => textOf(join(fresh, name)) !== textOf(join(held, name)));
    for (const name of stale.sort()) {
      console.error(`${relative(ROOT, join(held, name))} is not what the contract generates; run: npm run generate`);
    }
    process.exitCode = stale.length === 0 ? 0 : 1;
  } else {
    rmSync(held, { recursive: true, force: true });
    mkdirSync(held, { recursive: true });
    cpSync(fresh, held, { recursive: true });
  }
} finally {
  rmSync(fresh, { recursive: true });
}

function files(folder) {
  try {
    const entries = readdirSync(folder, { recursive: true, withFileTypes: true });
    return entries
      .filter((entry) => entry.isFile())
      .map((entry) => relative(folder, join(entry.parentPath, entry.name)));
  } catch (error) {
    if (error.code === "ENOENT") return [];
    throw error;
  }
}

function textOf(path) {
  try {
    return readFileSync(path, "utf8");
  } catch (error) {
    if (error.code === "ENOENT") return undefined;
    throw error;
  }
}
