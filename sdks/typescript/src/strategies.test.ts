/** Every strategy goes to the server and comes back with every number in force. */
import { afterAll, beforeAll, expect, inject, test } from "vitest";

import { failure } from "../testing/moves.js";
import { create } from "@bufbuild/protobuf";
import { StrategySchema } from "./generated/kakeya/v1/runtime_pb.js";
import * as kakeya from "./index.js";
import { strategyFromWire, strategyToWire } from "./strategies.js";

let client: kakeya.Client;
beforeAll(() => {
  client = new kakeya.Client(inject("target"));
});
afterAll(async () => {
  await client.close();
});

const EVERY: readonly kakeya.Strategy[] = [
  { kind: "full", codec: "int8", exactWindow: 16, exactLayers: [1] },
  { kind: "sink_window", sink: 2, window: 30 },
  { kind: "layer_window", fullLayers: [2], sink: 4, window: 30 },
  { kind: "restored", sink: 4, window: 32, source: "latent", bytesPerToken: 160, mode: "hold" },
  { kind: "gather", budget: 64, block: 4, sink: 4, window: 16, scorer: "bounds" },
  { kind: "tiered", budget: 40, block: 4, sink: 0, window: 20, residentTokens: 20 },
  { kind: "mac", ring: 32, band: 8, threshold: 0.25, chainLimit: -1 },
  { kind: "named", name: "newer_window", options: { window: "30", wide_layers: "0+2", factor: "0.5", note: "text" } },
];

test("every kind of the contract is tried here", () => {
  expect(EVERY.map((strategy) => strategy.kind).sort()).toEqual(StrategySchema.fields.map((arm) => arm.name).sort());
});

// Of packages that are not installed beside this server.
const ELSEWHERE = EVERY.filter(({ kind }) => kind === "mac");

test.each(EVERY.filter((strategy) => !ELSEWHERE.includes(strategy)))(
  "$kind comes back as it was asked for",
  async (strategy) => {
    await using session = await client.createSession({ strategy });
    expect(session.strategy).toMatchObject(strategy);
    expect((await session.info()).strategy).toEqual(session.strategy);
  },
);

test.each(ELSEWHERE)("$kind goes over the wire, and is refused with the name of its package", async (strategy) => {
  expect(strategyFromWire(strategyToWire(strategy))).toEqual(strategy);
  await expect(client.createSession({ strategy })).rejects.toThrow(`kakeya-${strategy.kind}`);
});

test("what is left out is filled in by the server", async () => {
  await using session = await client.createSession({ strategy: { kind: "sink_window", window: 30 } });
  expect(session.strategy).toEqual({ kind: "sink_window", sink: 4, window: 30 });
});

test("options of a named strategy are numbers, texts and arrays, and come back as text", async () => {
  const options = { window: 30, wide_layers: [0, 2], factor: 2.5, note: "text", sink: undefined };
  await using session = await client.createSession({ strategy: { kind: "named", name: "newer_window", options } });
  expect(session.strategy).toEqual({
    kind: "named",
    name: "newer_window",
    options: { sink: "4", window: "30", wide_layers: "0+2", factor: "2.5", note: "text" },
  });
  const again = await client.createSession({ strategy: session.strategy });
  expect(again.strategy).toEqual(session.strategy);
  await again.close();
});

test("a strategy of the contract can be asked for by its name, and is reported by its kind", async () => {
  await using session = await client.createSession({
    strategy: { kind: "named", name: "sink_window", options: { window: 30 } },
  });
  expect(session.strategy).toEqual({ kind: "sink_window", sink: 4, window: 30 });
});

test("a tiered session reports what it holds off the device", async () => {
  const tiered: kakeya.Strategy = { kind: "tiered", block: 4, sink: 0, window: 20, budget: 40, residentTokens: 20 };
  await using session = await client.createSession({ strategy: tiered });
  await session.append(Array.from({ length: 200 }, (_, n) => n % 128));
  await session.generate(4).result();
  const info = await session.info();
  expect(info.tierLiveBytes).toBeGreaterThan(0);
  expect(info.tierLiveBytes).toBeLessThanOrEqual(session.tierBytes);
});

test.each<[string, Record<string, unknown>]>([
  ["strategy", { kind: "ful" }],
  ["strategy", {}],
  ["strategy", { kind: "toString" }],
  ["strategy.sink_window.windows", { kind: "sink_window", windows: 3 }],
  ["strategy.sink_window.window", { kind: "sink_window", window: 1.5 }],
  ["strategy.sink_window.sink", { kind: "sink_window", sink: -1 }],
  ["strategy.full.codec", { kind: "full", codec: "" }],
  ["strategy.layer_window.full_layers", { kind: "layer_window", fullLayers: 2 }],
  ["strategy.layer_window.full_layers[1]", { kind: "layer_window", fullLayers: [2, -1] }],
  ["strategy.mac.threshold", { kind: "mac", threshold: NaN }],
  ["strategy.mac.chain_limit", { kind: "mac", chainLimit: 2 ** 31 }],
  ["strategy.restored.resident_latent_bytes", { kind: "restored", residentLatentBytes: -1 }],
  ["strategy.restored.awake_bytes", { kind: "restored", awakeBytes: -1 }],
  ["strategy.restored.appended", { kind: "restored", appended: "" }],
  ["strategy.named.name", { kind: "named" }],
  ["strategy.named.ring", { kind: "named", name: "mac", ring: 9 }],
  ["strategy.named.options", { kind: "named", name: "mac", options: [9] }],
  ["strategy.named.options.ring", { kind: "named", name: "mac", options: { ring: NaN } }],
  ["strategy.named.options.ring", { kind: "named", name: "mac", options: { ring: "" } }],
  ["strategy.named.options.ring", { kind: "named", name: "mac", options: { ring: true } }],
  ["strategy.named.options.layers", { kind: "named", name: "mac", options: { layers: [] } }],
  ["strategy.named.options.layers", { kind: "named", name: "mac", options: { layers: [1.5] } }],
])("what cannot be sent is refused as %s", async (field, strategy) => {
  const error = await failure(kakeya.InvalidArgument, () => strategyToWire(strategy as unknown as kakeya.Strategy));
  expect(error.field).toBe(field);
});

test("a strategy newer than this SDK is undefined", () => {
  expect(strategyFromWire(create(StrategySchema))).toBeUndefined();
});
