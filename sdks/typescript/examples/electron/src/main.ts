/**
 * The main process: holds the client, its key and its session, and hands the page one end of a port.
 *
 * The page is sandboxed and has no access to Node, to the network or to other windows; all it can do is say what
 * `protocol.ts` lets it say.
 *
 *     [KAKEYA_TOKENIZER=FOLDER] [KAKEYA_TARGET=127.0.0.1:50051] npm start
 */
import { readFile } from "node:fs/promises";
import { extname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { app, BrowserWindow, dialog, MessageChannelMain, protocol, type MessagePortMain } from "electron";

import { Client } from "@kakeya/runtime";
import { loadTokenizer } from "@kakeya/runtime/tokenization";

import { Conversation } from "./conversation.js";
import type { Port, Report, Request } from "./protocol.js";

const BUILT = fileURLToPath(new URL("./", import.meta.url));
const PAGE = join(BUILT, "..", "page");
/** All the page is made of. A page of its own scheme has an origin, as file: has not. */
const FILES: Readonly<Record<string, string>> = {
  "/": join(PAGE, "index.html"),
  "/style.css": join(PAGE, "style.css"),
  "/page.js": join(BUILT, "page.js"),
  "/chat.js": join(BUILT, "chat.js"),
};
const TYPES: Readonly<Record<string, string>> = { ".html": "text/html", ".css": "text/css", ".js": "text/javascript" };

protocol.registerSchemesAsPrivileged([{ scheme: "app", privileges: { standard: true, secure: true } }]);

function servePage(): void {
  protocol.handle("app", async (request) => {
    const path = FILES[new URL(request.url).pathname];
    if (path === undefined) return new Response("not found", { status: 404 });
    const body = await readFile(path, "utf8");
    return new Response(body, { headers: { "content-type": TYPES[extname(path)] ?? "text/plain" } });
  });
}

function openWindow(): BrowserWindow {
  const window = new BrowserWindow({
    width: 900,
    height: 700,
    title: "Kakeya",
    webPreferences: {
      preload: join(BUILT, "preload.cjs"),
      sandbox: true,
      contextIsolation: true,
      nodeIntegration: false,
    },
  });
  window.webContents.setWindowOpenHandler(() => ({ action: "deny" }));
  window.webContents.on("will-navigate", (event) => {
    event.preventDefault();
  });
  window.webContents.session.setPermissionRequestHandler((_contents, _permission, answer) => {
    answer(false);
  });
  return window;
}

function asPort(port: MessagePortMain): Port<Report, Request> {
  return {
    send: (report) => {
      port.postMessage(report);
    },
    onMessage: (listener) => {
      port.on("message", (event) => {
        listener(event.data as Request);
      });
      port.start();
    },
  };
}

async function run(): Promise<void> {
  const folder = process.env["KAKEYA_TOKENIZER"];
  const client = new Client(process.env["KAKEYA_TARGET"]);
  const tokenizer = folder === undefined ? await client.tokenizer(loadTokenizer) : await loadTokenizer(folder);
  const session = await client.createSession({
    strategy: { kind: "sink_window", window: 1024 },
    label: "electron",
  });
  servePage();
  const window = openWindow();
  await window.loadURL("app://chat/");
  const { port1, port2 } = new MessageChannelMain();
  window.webContents.postMessage("port", null, [port2]);
  await Conversation.over(asPort(port1), session, tokenizer);

  let isClosed = false;
  app.on("before-quit", (event) => {
    if (isClosed) return;
    event.preventDefault();
    // Whether or not the server can still be reached, the program ends.
    void session
      .close({ timeoutSeconds: 2 })
      .catch(() => undefined)
      .then(() => client.close())
      .then(() => {
        isClosed = true;
        app.quit();
      });
  });
}

app.on("window-all-closed", () => {
  app.quit();
});

app
  .whenReady()
  .then(run)
  .catch((error: unknown) => {
    dialog.showErrorBox("Kakeya", error instanceof Error ? error.message : String(error));
    app.exit(1);
  });
