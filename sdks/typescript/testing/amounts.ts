/** How much the tests under pressure do: `npm run test:long` does what `npm test` does in short. */
import { inject } from "vitest";

declare module "vitest" {
  interface ProvidedContext {
    isLong: boolean;
  }
}

const isLong = inject("isLong");

export const ABORTS = isLong ? 1000 : 60;
export const STREAM_TOKENS = isLong ? 10_000 : 800;
