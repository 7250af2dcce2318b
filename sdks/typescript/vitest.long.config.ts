import { configDefaults, defineConfig } from "vitest/config";

import short from "./vitest.config.js";

/** The tests under pressure in full: minutes. */
export default defineConfig({
  ...short,
  test: {
    ...short.test,
    include: ["src/pressure.test.ts", "testing/*.long.test.ts"],
    exclude: configDefaults.exclude,
    testTimeout: 900_000,
    provide: { isLong: true },
  },
});
