import { defineConfig } from "vitest/config";

import short from "./vitest.config.js";

/** The tests as they are, in Bun: see scripts/bun.mjs. */
export default defineConfig({
  ...short,
  test: { ...short.test, setupFiles: ["testing/in-bun.ts"] },
});
