// Runs the tests in Bun, instead of in Node.js.
//
//     node scripts/bun.mjs [TEST_FILE …]
//
// Bun is KAKEYA_BUN, or is fetched once, as the package that npm has for this machine (50 MB; no script of its is run).
import { execFileSync, spawnSync } from "node:child_process";
import { existsSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const VERSION = "1.4.5";
const here = fileURLToPath(new URL("../", import.meta.url));
const name = `bun-${process.platform}-${process.arch === "arm64" ? "aarch64" : process.arch}`;

const arguments_ = ["--bun", join("node_modules", "vitest", "vitest.mjs"), "run", "--config", "vitest.bun.config.ts"];
const { status, error } = spawnSync(process.env["KAKEYA_BUN"] ?? fetched(), [...arguments_, ...process.argv.slice(2)], {
  cwd: here,
  stdio: "inherit",
});
if (error !== undefined) throw error;
process.exitCode = status ?? 1;

/** The program's path. */
function fetched() {
  const folder = join(here, "node_modules", ".cache", `bun-${VERSION}`);
  const program = join(folder, "node_modules", "@oven", name, "bin", "bun");
  if (!existsSync(program)) {
    console.error(`setup: fetching @oven/${name} ${VERSION} (once, 50 MB)`);
    const flags = ["--silent", "--ignore-scripts", "--no-save", "--prefix", folder];
    execFileSync("npm", ["install", ...flags, `@oven/${name}@${VERSION}`], { stdio: "inherit" });
  }
  return program;
}
