/** The page's program: waits for the port, and opens the chat over it. */
import { openChat } from "./chat.js";

// It comes once, through the preload script, from this very window.
window.addEventListener("message", (event: MessageEvent) => {
  const [port] = event.ports;
  if (event.source === window && event.data === "port" && port !== undefined) openChat(document, port);
});
