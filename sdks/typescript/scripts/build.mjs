// Builds the package: ES modules in dist, and the same as CommonJS in dist/cjs.
//
//     node scripts/build.mjs
//
// The compiler makes ES modules and declarations; only what imports and exports is then written anew. Both kinds of module
// have the same declarations, which the package.json beside them says how to read.
import { execFileSync } from "node:child_process";
import { cpSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import ts from "typescript";

const here = fileURLToPath(new URL("../", import.meta.url));
const dist = join(here, "dist");
const common = join(dist, "cjs");

rmSync(dist, { recursive: true, force: true });
const compiler = fileURLToPath(import.meta.resolve("typescript/bin/tsc"));
execFileSync(process.execPath, [compiler, "-p", "tsconfig.build.json"], { cwd: here, stdio: "inherit" });

const compilerOptions = { module: ts.ModuleKind.Node16, target: ts.ScriptTarget.ES2022, esModuleInterop: true };
for (const name of readdirSync(dist, { recursive: true })) {
  const to = join(common, name);
  if (name.endsWith(".d.ts")) {
    cpSync(join(dist, name), to);
  } else if (name.endsWith(".js")) {
    // The ending says that CommonJS is wanted; an `import()` stays one, for packages that are ES modules alone.
    const { outputText } = ts.transpileModule(readFileSync(join(dist, name), "utf8"), {
      fileName: name.replace(/\.js$/, ".cts"),
      compilerOptions,
    });
    mkdirSync(dirname(to), { recursive: true });
    writeFileSync(to, outputText);
  }
}
writeFileSync(join(common, "package.json"), `${JSON.stringify({ type: "commonjs", sideEffects: false })}\n`);
