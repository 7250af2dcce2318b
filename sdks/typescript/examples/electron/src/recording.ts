/**
 * A conversation with a real server and tokenizer, as the main process has it: what was said, and what was sent back.
 *
 * A program for `screenshot.mjs`: TARGET and TOKENIZER_FOLDER are its first arguments.
 */
import { MessageChannel } from "node:worker_threads";

import { Client } from "@kakeya/runtime";
import { loadTokenizer } from "@kakeya/runtime/tokenization";

import { Conversation } from "./conversation.js";
import type { Port, Report, Request } from "./protocol.js";

const SAID = ["Why is the sky blue?", "Say it in one short sentence.", "And why is a sunset red?"];

export interface Scene {
  readonly say?: string;
  readonly reports: readonly Report[];
}

const [, , target, folder = ""] = process.argv;
const tokenizer = await loadTokenizer(folder);
await using client = new Client(target);
await using session = await client.createSession({
  strategy: { kind: "sink_window", window: 1024 },
});

const { port1, port2 } = new MessageChannel();
const port: Port<Report, Request> = {
  send: (report) => {
    port1.postMessage(report);
  },
  onMessage: (listener) => port1.on("message", listener),
};
const say = (request: Request): void => {
  port2.postMessage(request);
};

/** What comes until a report of one of these kinds. */
function reportsUntil(...kinds: readonly Report["kind"][]): Promise<Report[]> {
  const reports: Report[] = [];
  return new Promise((resolve) => {
    const receive = (report: Report): void => {
      reports.push(report);
      if (report.kind === "piece") say({ kind: "shown", count: 1 });
      if (!kinds.includes(report.kind)) return;
      port2.off("message", receive);
      resolve(reports);
    };
    port2.on("message", receive);
  });
}

const greeting = reportsUntil("ready");
await Conversation.over(port, session, tokenizer, { maxTokens: 96, temperature: 0 });
export const scenes: Scene[] = [{ reports: await greeting }];
for (const text of SAID) {
  const reports = reportsUntil("end", "failed");
  say({ kind: "say", text });
  scenes.push({ say: text, reports: await reports });
}
port1.close();
