/** The bridge over a real MessagePort, between the real server and the page in a document without a browser. */
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { MessageChannel, type MessagePort } from "node:worker_threads";

import { Window } from "happy-dom";
import { afterAll, beforeAll, beforeEach, expect, inject, test, vi } from "vitest";

import { Client, type Session } from "@kakeya/runtime";
import { loadTokenizer, type ChatTokenizer } from "@kakeya/runtime/tokenization";

import { PYTHON, ROOT } from "../../../testing/python.mjs";
import { openServer } from "../../../testing/servers.js";
import { openChat, type PagePort } from "./chat.js";
import { Conversation } from "./conversation.js";
import { PIECES_AHEAD, type Port, type Report, type Request } from "./protocol.js";
import { TextStream } from "./text-stream.js";

const LONG = 20_000;
let folder: string;
let tokenizer: ChatTokenizer;
let client: Client;
let session: Session;
let channel: MessageChannel;

beforeAll(async () => {
  const { target } = await openServer(inject("control"), { engine: { strategy: "sink_window:sink=4,window=64" } });
  client = new Client(target);
  folder = mkdtempSync(join(tmpdir(), "tokenizers-"));
  execFileSync(PYTHON, ["-m", "tests.conformance.save_tokenizers", folder], { cwd: ROOT });
  tokenizer = await loadTokenizer(join(folder, "ChatML"));
});
afterAll(async () => {
  await client.close();
  rmSync(folder, { recursive: true });
});
beforeEach(async () => {
  session = await client.createSession();
  channel = new MessageChannel();
  return async () => {
    channel.port1.close();
    await session.close();
  };
});

function asPort(port: MessagePort): Port<Report, Request> {
  return {
    send: (report) => {
      port.postMessage(report);
    },
    onMessage: (listener) => port.on("message", listener),
  };
}

/** The page in a document of its own, connected. */
async function openPage(): Promise<{
  shown: (selector: string) => string;
  say: (words: string) => void;
  stop: () => void;
}> {
  const window = new Window();
  const html = readFileSync(fileURLToPath(new URL("../page/index.html", import.meta.url)), "utf8");
  window.document.write(html.replace(/<script.*<\/script>|<link[^>]*>/g, ""));
  const document = window.document as unknown as Document;
  const get = (selector: string): HTMLElement | null => document.querySelector(selector);
  openChat(document, channel.port2 as unknown as PagePort);
  const shown = (selector: string): string => get(selector)?.textContent ?? "";
  await vi.waitUntil(() => shown("#status") === "ready");
  return {
    shown,
    say: (words) => {
      (get("#text") as HTMLInputElement).value = words;
      (get("#send") as HTMLButtonElement).click();
    },
    stop: () => {
      (get("#stop") as HTMLButtonElement).click();
    },
  };
}

test("what is said is answered, piece by piece, and the page shows what the session holds", async () => {
  await Conversation.over(asPort(channel.port1), session, tokenizer, { maxTokens: 24, temperature: 0 });
  const page = await openPage();
  expect([page.shown("#model"), page.shown("#strategy"), page.shown("#history")]).toEqual([
    "tiny",
    "sink window",
    "0 tokens",
  ]);
  for (const turn of [1, 2]) {
    page.say(`Hello ${turn}`);
    expect(page.shown(".user:last-of-type")).toBe(`Hello ${turn}`);
    await vi.waitUntil(() => page.shown("#status") === "cut at the token limit", { timeout: 20_000 });
  }
  const info = await session.info();
  expect(page.shown("#history")).toBe(`${info.historyLength} tokens`);
  expect(page.shown("#held")).toMatch(/^[\d.]+ KiB of [\d.]+ KiB$/);
  expect(page.shown("#log").length).toBeGreaterThan("Hello 1Hello 2".length);
});

test("stop ends a turn, and the next one goes on from what was said", async () => {
  await Conversation.over(asPort(channel.port1), session, tokenizer, { maxTokens: LONG, temperature: 1 });
  const page = await openPage();
  page.say("Go on for ever");
  await vi.waitUntil(() => page.shown(".model").length > 10, { timeout: 20_000 });
  page.stop();
  await vi.waitUntil(() => page.shown("#status") === "stopped", { timeout: 20_000 });
  const { historyLength } = await session.info();
  expect(historyLength).toBeLessThan(LONG);
  page.say("And now?");
  await vi.waitUntil(() => page.shown("#status") === "speaking", { timeout: 20_000 });
  page.stop();
  await vi.waitUntil(() => page.shown("#status") === "stopped", { timeout: 20_000 });
  expect((await session.info()).historyLength).toBeGreaterThan(historyLength);
});

test("a page that shows nothing holds back the main process", async () => {
  await Conversation.over(asPort(channel.port1), session, tokenizer, { maxTokens: LONG, temperature: 1 });
  let pieces = 0;
  channel.port2.on("message", (report: Report) => {
    pieces += report.kind === "piece" ? 1 : 0;
  });
  channel.port2.postMessage({ kind: "say", text: "Hello" } satisfies Request);
  await vi.waitUntil(() => pieces === PIECES_AHEAD, { timeout: 20_000 });
  const { historyLength } = await session.info();
  while ((await session.info()).historyLength < historyLength + 50);
  expect(pieces).toBe(PIECES_AHEAD);
  channel.port2.postMessage({ kind: "shown", count: 10 } satisfies Request);
  await vi.waitUntil(() => pieces === PIECES_AHEAD + 10, { timeout: 20_000 });
  channel.port2.postMessage({ kind: "stop" } satisfies Request);
});

test("what goes wrong is shown, and the page can be used again", async () => {
  await Conversation.over(asPort(channel.port1), session, tokenizer);
  const page = await openPage();
  await session.close();
  page.say("Hello?");
  await vi.waitUntil(() => page.shown("#status") === "failed", { timeout: 20_000 });
  expect(page.shown(".error")).toContain("SessionClosed");
});

test("a character that takes several ids comes whole", async () => {
  const bytes = await loadTokenizer(join(folder, "bytes"));
  const text = "naïve café 東京 🙂 end";
  const stream = new TextStream(bytes);
  const pieces = bytes.encode(text).map((id) => stream.push(id));
  expect(pieces.join("")).toBe(text);
  expect(pieces.join("|")).not.toContain("\u{fffd}");
});
