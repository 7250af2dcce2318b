import { configDefaults, defineConfig } from "vitest/config";

import short, { FURTHER } from "./vitest.config.js";

export default defineConfig({ ...short, test: { ...short.test, include: FURTHER, exclude: configDefaults.exclude } });
