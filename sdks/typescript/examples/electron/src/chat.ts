/** The chat window: what was said, what is being said, and what the session holds. */
import type { Facts, Report, Request } from "./protocol.js";

/** The page's end of the port. */
export interface PagePort {
  onmessage: ((event: MessageEvent) => void) | null;
  postMessage(request: Request): void;
}

const ENDINGS: Readonly<Record<string, string>> = {
  stopped: "stopped",
  max_tokens: "cut at the token limit",
  truncated: "the history is full",
};

/** Shows a conversation in `document`, over `port`. */
export function openChat(document: Document, port: PagePort): void {
  const form = element(document, "form");
  const input = element(document, "#text") as HTMLInputElement;
  const send = element(document, "#send") as HTMLButtonElement;
  const stop = element(document, "#stop") as HTMLButtonElement;
  const meter = element(document, "#meter") as HTMLMeterElement;
  const log = element(document, "#log");
  const status = element(document, "#status");
  let said: HTMLElement | undefined;

  function setSpeaking(isSpeaking: boolean): void {
    send.disabled = input.disabled = isSpeaking;
    stop.disabled = !isSpeaking;
    if (!isSpeaking) input.focus();
  }

  function add(speaker: string, text: string): HTMLElement {
    const message = document.createElement("p");
    message.className = speaker;
    message.textContent = text;
    log.append(message);
    log.scrollTop = log.scrollHeight;
    return message;
  }

  function showFacts(facts: Facts): void {
    element(document, "#model").textContent = facts.modelId;
    element(document, "#strategy").textContent = facts.strategy.replaceAll("_", " ");
    element(document, "#history").textContent = `${facts.historyTokens.toLocaleString("en")} tokens`;
    element(document, "#held").textContent = `${bytes(facts.heldBytes)} of ${bytes(facts.peakBytes)}`;
    meter.max = facts.peakBytes;
    meter.value = facts.heldBytes;
  }

  function show(report: Report): void {
    switch (report.kind) {
      case "ready":
        showFacts(report.facts);
        status.textContent = "ready";
        setSpeaking(false);
        break;
      case "reading":
        status.textContent = `reading ${String(report.doneTokens)} of ${String(report.totalTokens)} tokens`;
        break;
      case "piece":
        said ??= add("model", "");
        said.textContent += report.text;
        log.scrollTop = log.scrollHeight;
        status.textContent = "speaking";
        port.postMessage({ kind: "shown", count: 1 });
        break;
      case "end":
        said = undefined;
        showFacts(report.facts);
        status.textContent = ENDINGS[report.stopReason] ?? "ready";
        setSpeaking(false);
        break;
      case "failed":
        said = undefined;
        add("error", `${report.name}: ${report.message}`);
        status.textContent = report.canRetry ? "try again in a while" : "failed";
        setSpeaking(false);
        break;
    }
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const words = input.value.trim();
    if (words === "" || send.disabled) return;
    add("user", words);
    input.value = "";
    setSpeaking(true);
    port.postMessage({ kind: "say", text: words });
  });
  stop.addEventListener("click", () => {
    port.postMessage({ kind: "stop" });
  });
  port.onmessage = (event) => {
    show(event.data as Report);
  };
}

function element(document: Document, selector: string): HTMLElement {
  const found = document.querySelector<HTMLElement>(selector);
  if (found === null) throw new TypeError(`the page has no ${selector}`);
  return found;
}

function bytes(count: number): string {
  const units = ["B", "KiB", "MiB", "GiB"];
  const power = count < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(count) / 10));
  return `${(count / 1024 ** power).toFixed(power === 0 ? 0 : 1)} ${units[power] ?? ""}`;
}
