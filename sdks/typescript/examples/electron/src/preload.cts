/** Passes the port on to the page, and nothing else: the page sees neither Electron nor Node. */
import electron = require("electron");

electron.ipcRenderer.once("port", (event) => {
  globalThis.postMessage("port", globalThis.location.origin, [...event.ports]);
});
