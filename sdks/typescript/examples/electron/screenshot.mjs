// A conversation with a real model, as the page shows it in Chromium.
//
//     npm run screenshot -- TARGET TOKENIZER_FOLDER PICTURE.png
//
// The conversation runs here, over a MessagePort, as in the main process; what was sent is then played to the page.
import { execFile } from "node:child_process";
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

import { runnerImport, transformWithEsbuild } from "vite";

const file = (name) => fileURLToPath(new URL(name, import.meta.url));
const picture = process.argv[4];
if (picture === undefined) throw new Error("usage: npm run screenshot -- TARGET TOKENIZER_FOLDER PICTURE.png");

const alias = [
  { find: /^@kakeya\/runtime$/, replacement: file("../../src/index.ts") },
  { find: /^@kakeya\/runtime\/tokenization$/, replacement: file("../../src/tokenization.ts") },
];
const { module } = await runnerImport(file("src/recording.ts"), { esbuild: { target: "es2022" }, resolve: { alias } });
const replay = `
  import { openChat } from "/chat.js";
  const { port1, port2 } = new MessageChannel();
  openChat(document, port1);
  for (const { say, reports } of ${JSON.stringify(module.scenes)}) {
    if (say !== undefined) {
      document.querySelector("#text").value = say;
      document.querySelector("form").requestSubmit();
    }
    for (const report of reports) port2.postMessage(report);
    await new Promise((later) => setTimeout(later, 50));
  }`;
const chat = await transformWithEsbuild(readFileSync(file("src/chat.ts"), "utf8"), "chat.ts");
const files = {
  "/": ["text/html", readFileSync(file("page/index.html"))],
  "/style.css": ["text/css", readFileSync(file("page/style.css"))],
  "/chat.js": ["text/javascript", chat.code],
  "/page.js": ["text/javascript", replay],
};
const server = createServer((request, response) => {
  const [type, body] = files[request.url] ?? ["text/plain", ""];
  response.writeHead(200, { "content-type": type }).end(body);
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const flags = ["--headless=new", "--hide-scrollbars", "--window-size=900,720", "--virtual-time-budget=4000"];
// Chromium refuses its sandbox to root, as in a container.
if (process.getuid?.() === 0) flags.push("--no-sandbox");
const page = `http://127.0.0.1:${server.address().port}/`;
try {
  await promisify(execFile)("chromium", [...flags, `--screenshot=${picture}`, page], { timeout: 60_000 });
} finally {
  server.close();
}
