/**
 * What the page and the main process say to each other, over a MessagePort. Plain values only: classes do not survive
 * the transfer between processes.
 *
 * Pieces of text are acknowledged by the page. At most `PIECES_AHEAD` are in flight; then the main process reads no
 * further, the SDK holds back the server, and a page that is busy costs no memory anywhere.
 */

export const PIECES_AHEAD = 32;

/** From the page. */
export type Request =
  | { readonly kind: "say"; readonly text: string }
  | { readonly kind: "stop" }
  /** The page has shown so many pieces. */
  | { readonly kind: "shown"; readonly count: number };

/** From the main process. */
export type Report =
  | { readonly kind: "ready"; readonly facts: Facts }
  /** The prompt is being read. */
  | { readonly kind: "reading"; readonly doneTokens: number; readonly totalTokens: number }
  | { readonly kind: "piece"; readonly text: string }
  /** The turn is over. */
  | { readonly kind: "end"; readonly stopReason: string; readonly facts: Facts }
  /** The turn went wrong. `canRetry`: later it can go well. */
  | { readonly kind: "failed"; readonly name: string; readonly message: string; readonly canRetry: boolean };

/** What the session is, and what it holds. */
export interface Facts {
  readonly modelId: string;
  readonly strategy: string;
  readonly historyTokens: number;
  readonly heldBytes: number;
  readonly peakBytes: number;
}

/** One end of a MessagePort, of Electron's or of Node's. */
export interface Port<Out, In> {
  send(message: Out): void;
  onMessage(listener: (message: In) => void): void;
}
