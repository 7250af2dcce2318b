/* Search runs in a worker, and browsers start none from a page that is a file on disk. There an invisible frame takes
 * its place: it loads the worker's script, and the two talk through the functions that are put under a worker's names. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #waiting = [];
    #receive = null;

    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html>";
      frame.addEventListener("load", () => this.#start(frame.contentWindow, url), { once: true });
      document.body.append(frame);
    }

    postMessage(data) {
      if (this.#receive === null) this.#waiting.push(data);
      else this.#receive({ data });
    }

    terminate() {
      this.#receive = () => {};
    }

    #start(inside, url) {
      const listeners = [];
      inside.addEventListener = (kind, listener) => kind === "message" && listeners.push(listener);
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = String(url);
      script.onload = () => {
        this.#receive = (event) => listeners.forEach((listener) => listener(event));
        this.#waiting.splice(0).forEach((data) => this.postMessage(data));
      };
      inside.document.body.append(script);
    }
  };
}
