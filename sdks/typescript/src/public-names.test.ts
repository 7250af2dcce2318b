/** What is public, and that Python says the same. */
import { execFileSync } from "node:child_process";

import { expect, test } from "vitest";

import { PYTHON, ROOT } from "../testing/python.mjs";
import * as kakeya from "./index.js";

const VALUES = `
AppendTooLarge AppendUnresolved CallerError Client ConnectionFailed ConstraintFailed ConstraintUnavailable DeadlineExceeded Draining EngineStalled
GenerateStream HistoryBehindClient HistoryCorrupt HistoryLengthMismatch HistoryLimit JournalAway JournalFull ModelMismatch
InternalError InvalidArgument InvalidConstraint InvalidMessages InvalidTokenIds InvalidTool InvariantViolated KakeyaError NoCapacity NonFiniteLogits
OutOfMemory Overloaded ProtocolError QuotaExceeded RequestIdReused RestorationFailed RetryableError ServerError
Session SessionBusy SessionClosed SessionElsewhere SessionEvicted SessionNotFound SlowConsumer StateError StreamTakenOver TemplateError
TextStream TLSFailed TokenizerError TokenOutOfRange ToolCallError ToolFormatUnknown TransportError Unauthenticated
`
  .trim()
  .split(/\s+/);
/** Plain values have types alone; the compiler knows them. */
const TYPES = `
Choice Constraint Durability Full Gather GenerateResult HistoryPiece JsonSchema Lark LayerWindow Mac Mode Named Progress Regex Restored RetryPolicy ServerInfo
SessionInfo SessionSummary SinkWindow StopReason Strategy TLS TextResult Thought Tiered TokenDetail TopLogprob Usage
`
  .trim()
  .split(/\s+/);

test("the public names are these", () => {
  expect(Object.keys(kakeya).sort()).toEqual([...VALUES].sort());
});

test("every word of the Python SDK's has its counterpart", () => {
  const printed = execFileSync(PYTHON, ["-c", "import kakeya; print(*kakeya.__all__)"], {
    cwd: ROOT,
    encoding: "utf8",
  });
  // TypeScript has one client, which is asynchronous.
  const words = printed
    .trim()
    .split(" ")
    .filter((word) => !word.startsWith("Async"));
  expect([...VALUES, ...TYPES]).toEqual(expect.arrayContaining(words));
});
