import { fileURLToPath } from "node:url";

import { defineConfig } from "vitest/config";

const source = (name: string): string => fileURLToPath(new URL(`src/${name}.ts`, import.meta.url));

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
