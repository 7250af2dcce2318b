/** The tree says whose turn it is, and each class carries the facts of its situation. */
import { anyPack } from "@bufbuild/protobuf/wkt";
import { create } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";
import { expect, inject, test } from "vitest";

import { serverReasons } from "../testing/servers.js";
import { ErrorInfoSchema, RetryInfoSchema } from "./generated/google/rpc/error_details_pb.js";
import * as kakeya from "./index.js";
import { CLASS_BY_REASON, fromConnectError } from "./status.js";

/** As a status with details comes out of the transport. */
function failed(
  code: Code,
  reason?: string,
  more: { metadata?: Record<string, string>; domain?: string; delay?: [bigint, number]; status?: Code } = {},
): ConnectError {
  const error = new ConnectError("so it is", code, { "grpc-status": String(more.status ?? code) });
  const { domain = "kakeya.v1", metadata = {} } = more;
  if (reason !== undefined) {
    const info = anyPack(ErrorInfoSchema, create(ErrorInfoSchema, { domain, reason, metadata }));
    error.details.push({ type: ErrorInfoSchema.typeName, value: info.value });
  }
  if (more.delay !== undefined) {
    const [seconds, nanos] = more.delay;
    const retry = anyPack(RetryInfoSchema, create(RetryInfoSchema, { retryDelay: { seconds, nanos } }));
    error.details.push({ type: RetryInfoSchema.typeName, value: retry.value });
  }
  return error;
}

/** Connect's number for a code as gRPC writes it. */
function codeOf(name = ""): Code {
  const [, code] = Object.entries(Code).find(([each]) => each.toUpperCase() === name.replaceAll("_", "")) ?? [];
  if (typeof code !== "number") throw new Error(`Connect has no code ${name}`);
  return code;
}

const explain = (error: ConnectError, isLate = false): kakeya.KakeyaError =>
  fromConnectError(error, "10.1.2.3:99", { isLate });

test("every reason that the server can give has one class of its own name, and no other reason has one", async () => {
  const codes = await serverReasons(inject("control"));
  expect(Object.keys(CLASS_BY_REASON).sort()).toEqual(Object.keys(codes).sort());
  for (const [reason, kind] of Object.entries(CLASS_BY_REASON)) {
    const error = explain(failed(codeOf(codes[reason]), reason));
    expect(error.constructor).toBe(kind);
    expect([error.name, error.reason, error.code, error.message]).toEqual([
      kind.name,
      reason,
      codes[reason],
      "so it is",
    ]);
    expect((kakeya as Record<string, unknown>)[kind.name]).toBe(kind);
  }
});

test.each([
  [Code.Aborted, kakeya.RetryableError],
  [Code.ResourceExhausted, kakeya.RetryableError],
  [Code.DataLoss, kakeya.ServerError],
  [Code.FailedPrecondition, kakeya.CallerError],
  [Code.InvalidArgument, kakeya.InvalidArgument],
])("a reason newer than this SDK is chosen by its code, %i", (code, kind) => {
  for (const reason of ["INVENTED_LATER", "constructor"]) {
    const error = explain(failed(code, reason, { metadata: { shape: "round" } }));
    expect(error.constructor).toBe(kind);
    expect([error.reason, error.metadata]).toEqual([reason, { shape: "round" }]);
  }
});

test("the facts of an error are properties", () => {
  const facts = (code: Code, reason: string, metadata = {}): kakeya.KakeyaError =>
    explain(failed(code, reason, { metadata }));
  const mismatch = facts(Code.Aborted, "HISTORY_LENGTH_MISMATCH", { expected: "3", actual: "5" });
  expect(mismatch).toHaveProperty("expected", 3);
  expect(mismatch).toHaveProperty("actual", 5);
  const evicted = facts(Code.NotFound, "SESSION_EVICTED", { cause: "idle" });
  expect(evicted).toBeInstanceOf(kakeya.SessionNotFound);
  expect(evicted).toHaveProperty("evictionCause", "idle");
  expect(facts(Code.Internal, "INTERNAL", { incident: "abc" })).toHaveProperty("incident", "abc");
  expect(facts(Code.FailedPrecondition, "INV2")).toHaveProperty("kind", "INV2");
});

test("the wait that the server asks for is kept", () => {
  const error = explain(failed(Code.Unavailable, "DRAINING", { delay: [2n, 500_000_000] }));
  expect(error.retryAfterSeconds).toBe(2.5);
});

test("an ErrorInfo of another domain is not ours", () => {
  const error = explain(failed(Code.NotFound, "SESSION_NOT_FOUND", { domain: "proxy.example" }));
  expect([error.constructor, error.reason, error.code]).toEqual([kakeya.TransportError, undefined, "NOT_FOUND"]);
});

test("a status that contradicts itself explains nothing", () => {
  const error = explain(failed(Code.NotFound, "SESSION_NOT_FOUND", { status: Code.Internal }));
  expect(error.constructor).toBe(kakeya.TransportError);
});

test.each([
  [Code.Unavailable, false, kakeya.ConnectionFailed],
  [Code.DeadlineExceeded, false, kakeya.DeadlineExceeded],
  [Code.Canceled, true, kakeya.DeadlineExceeded],
  [Code.ResourceExhausted, false, kakeya.TransportError],
  [Code.Unimplemented, false, kakeya.TransportError],
])("a failure without an explanation, %i, names the target", (code, isLate, kind) => {
  const error = explain(failed(code), isLate);
  expect(error.constructor).toBe(kind);
  expect(error.message).toContain("10.1.2.3:99");
  expect(error.message).toContain("so it is");
});
