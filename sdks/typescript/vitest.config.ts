import { fileURLToPath } from "node:url";

import { configDefaults, defineConfig } from "vitest/config";

const source = (name: string): string => fileURLToPath(new URL(`src/${name}.ts`, import.meta.url));

/** Of what is published, and under pressure: `make test-further` runs them. */
export const FURTHER = ["src/package.test.ts", "src/pressure.test.ts"];

export default defineConfig({
  // The examples import the package by its name, as their readers will.
  resolve: {
    alias: [
      { find: /^@kakeya\/runtime$/, replacement: source("index") },
      { find: /^@kakeya\/runtime\/tokenization$/, replacement: source("tokenization") },
      { find: /^@kakeya\/runtime\/tools$/, replacement: source("tools") },
    ],
  },
  test: {
    include: ["src/**/*.test.ts", "examples/**/*.test.ts"],
    exclude: [...configDefaults.exclude, ...FURTHER],
    provide: { isLong: false },
    globalSetup: "testing/servers.ts",
    // Generous: a machine that is busy with something else is slow. Nothing is expected to take that long.
    testTimeout: 180_000,
    hookTimeout: 120_000,
    // Files share the servers, whose model computes on one core.
    maxWorkers: 2,
    execArgv: ["--expose-gc"],
  },
});
