/** The main process's end: one session, whose turns a page asks for over a port. Knows nothing of Electron. */
import { KakeyaError, RetryableError, type Session } from "@kakeya/runtime";
import { tokensForChat, tokensForNextTurn, type ChatTokenizer, type Message } from "@kakeya/runtime/tokenization";

import { PIECES_AHEAD, type Facts, type Port, type Report, type Request } from "./protocol.js";
import { TextStream } from "./text-stream.js";

/** How a conversation speaks. */
export interface Voice {
  readonly maxTokens: number;
  readonly temperature: number;
}

export class Conversation {
  readonly #session: Session;
  readonly #tokenizer: ChatTokenizer;
  readonly #port: Port<Report, Request>;
  readonly #voice: Voice;
  #after: readonly number[] | undefined = undefined;
  #turn: AbortController | undefined = undefined;
  #ahead = 0;
  #onShown: (() => void) | undefined = undefined;

  private constructor(session: Session, tokenizer: ChatTokenizer, port: Port<Report, Request>, voice: Voice) {
    this.#session = session;
    this.#tokenizer = tokenizer;
    this.#port = port;
    this.#voice = voice;
  }

  /** Notifies the page that it may speak, and listens. */
  static async over(
    port: Port<Report, Request>,
    session: Session,
    tokenizer: ChatTokenizer,
    voice: Voice = { maxTokens: 256, temperature: 0 },
  ): Promise<Conversation> {
    const conversation = new Conversation(session, tokenizer, port, voice);
    port.onMessage((request) => {
      conversation.#receive(request);
    });
    port.send({ kind: "ready", facts: await conversation.#facts() });
    return conversation;
  }

  #receive(request: Request): void {
    switch (request.kind) {
      case "say":
        // The page sends no message before the turn is over.
        if (this.#turn === undefined) void this.#answer(request.text);
        break;
      case "stop":
        this.#turn?.abort();
        this.#onShown?.();
        break;
      case "shown":
        this.#ahead -= request.count;
        this.#onShown?.();
        break;
    }
  }

  /** One turn. Every failure is reported to the page. */
  async #answer(text: string): Promise<void> {
    const turn = new AbortController();
    this.#turn = turn;
    this.#ahead = 0;
    try {
      const stopReason = await this.#generate({ role: "user", content: text }, turn.signal);
      this.#port.send({ kind: "end", stopReason, facts: await this.#facts() });
    } catch (error) {
      const { name, message } = error instanceof Error ? error : new Error(String(error));
      this.#port.send({ kind: "failed", name, message, canRetry: error instanceof RetryableError });
      if (!(error instanceof KakeyaError)) throw error;
    } finally {
      this.#turn = undefined;
    }
  }

  async #generate(message: Message, stopped: AbortSignal): Promise<string> {
    const tokenIds =
      this.#after === undefined
        ? tokensForChat([message], this.#tokenizer)
        : tokensForNextTurn([message], this.#tokenizer, { after: this.#after });
    await this.#session.append(tokenIds);
    const stream = this.#session.generate(this.#voice.maxTokens, {
      temperature: this.#voice.temperature,
      onProgress: ({ doneTokens, totalTokens }) => {
        this.#port.send({ kind: "reading", doneTokens, totalTokens });
      },
    });
    const words = new TextStream(this.#tokenizer);
    try {
      for await (const tokenId of stream) {
        const piece = words.push(tokenId);
        if (piece !== "") {
          this.#port.send({ kind: "piece", text: piece });
          this.#ahead += 1;
        }
        while (this.#ahead >= PIECES_AHEAD && !stopped.aborted) await this.#shown();
        // Leaving the loop stops the generation; what came stays in the history.
        if (stopped.aborted) return "stopped";
      }
      return (await stream.result()).stopReason;
    } finally {
      this.#after = stream.tokenIds;
    }
  }

  /** Until the page has shown something, or the turn is stopped. */
  #shown(): Promise<void> {
    return new Promise((resolve) => {
      this.#onShown = resolve;
    });
  }

  async #facts(): Promise<Facts> {
    const info = await this.#session.info();
    return {
      modelId: this.#session.modelId,
      strategy: this.#session.strategy?.kind ?? "unknown",
      historyTokens: info.historyLength,
      heldBytes: info.kvLiveBytes,
      peakBytes: info.peakBytes,
    };
  }
}
