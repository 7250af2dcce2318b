/** A connection to a runtime. */
import { Link } from "./link.js";
import type { ChatTokenizer } from "./chat-tokens.js";
import { invalid, textOf } from "./checks.js";
import type { ListSessionsRequest } from "./generated/kakeya/v1/runtime_pb.js";
import {
  known,
  type CallOptions,
  type ClientOptions,
  type CreateSessionOptions,
  type SessionsOptions,
} from "./options.js";
import { createSessionRequest, listRequest } from "./requests.js";
import { newRoute, routeOf } from "./route.js";
import { servedTokenizer } from "./served-tokenizer.js";
import { Session } from "./session.js";
import {
  createdFacts,
  reopenedFacts,
  serverInfoOf,
  sessionSummaryOf,
  type ServerInfo,
  type SessionSummary,
} from "./values.js";

/**
 * A connection to a runtime, made by the first call. Closing it, or leaving the block of its `await using`, ends what
 * runs on it and closes no session.
 */
export class Client implements AsyncDisposable {
  readonly #link: Link;
  #hasWarned = false; // of a server without the model's ends

  /** Throws InvalidArgument; a certificate file that cannot be read throws Node's own error. */
  constructor(target = "127.0.0.1:50051", options: ClientOptions = {}) {
    this.#link = new Link(target, known(options, "Client"));
  }

  get target(): string {
    return this.#link.target;
  }

  get isClosed(): boolean {
    return this.#link.isClosed;
  }

  /** Open a session and reserve its memory. */
  async createSession(options: CreateSessionOptions = {}): Promise<Session> {
    const request = createSessionRequest(options);
    const patience = this.#link.patience(options, newRoute(), { movesOn: true });
    const reply = await this.#link.repeat((rpc, each) => rpc.createSession(request, each), patience);
    const route = routeOf(reply.sessionId) || patience.route;
    if (options.eosTokenIds === undefined && reply.eosTokenIds === undefined) this.#warnWithoutEnds();
    return Session.opened(this.#link, createdFacts(reply), route);
  }

  #warnWithoutEnds(): void {
    if (this.#hasWarned) return;
    this.#hasWarned = true;
    process.emitWarning(
      `the server at ${this.target} is older than this SDK and does not know what ends a turn of its model: without ` +
        "eosTokenIds nothing ends a Generate but its maxTokens; endOfTurnIds(tokenizer) has them",
      "KakeyaWarning",
    );
  }

  /**
   * One of your own sessions, by its id, to go on with it: in another process, after a crash, from a list.
   *
   * Throws SessionNotFound if it is closed, unknown or another owner's. Leaving the block of its `await using` closes it.
   */
  async session(sessionId: string, options: CallOptions = {}): Promise<Session> {
    if (textOf(sessionId, "sessionId") === "")
      throw invalid("sessionId", "must be the id of a session, got an empty one");
    const route = routeOf(sessionId);
    const patience = this.#link.patience(known(options, "this call"), route);
    const info = await this.#link.repeat((rpc, each) => rpc.getSessionInfo({ sessionId }, each), patience);
    const server = await this.#link.repeat((rpc, each) => rpc.getServerInfo({}, each), patience);
    return Session.opened(this.#link, reopenedFacts(sessionId, info, server), route, info.generating);
  }

  /**
   * Your own sessions on the server, read in pages. Once only.
   *
   * Behind a proxy before several servers, those of one server.
   */
  sessions(options: SessionsOptions = {}): AsyncIterableIterator<SessionSummary> {
    this.#link.requireOpen();
    return this.#sessions(listRequest(options), options);
  }

  async *#sessions(request: ListSessionsRequest, options: CallOptions): AsyncGenerator<SessionSummary, undefined> {
    do {
      const patience = this.#link.patience(options);
      const page = await this.#link.repeat((rpc, each) => rpc.listSessions(request, each), patience);
      for (const listed of page.sessions) yield sessionSummaryOf(listed);
      request.pageToken = page.nextPageToken;
    } while (request.pageToken !== "");
  }

  /** The server's model, limits and strategies, now. */
  async serverInfo(options: CallOptions = {}): Promise<ServerInfo> {
    const patience = this.#link.patience(known(options, "this call"));
    return serverInfoOf(await this.#link.repeat((rpc, each) => rpc.getServerInfo({}, each), patience));
  }

  /**
   * The served model's tokenizer, from `folder` on this machine. `load` is `loadTokenizer` of the package's part
   * `tokenization`, which a program without text can so leave out.
   *
   * Without one it looks for the model by the name that the server says: one of Kakeya's in its cache
   * (`KAKEYA_CACHE_DIR`), one of the hub in the hub's cache. No network is asked, and no path that the server says is
   * opened.
   *
   * Throws TokenizerError, with how to get it, if it is not there; and for another model's tokenizer, one that has more
   * tokens of text than the served model has ids, or none of the ends that the server says.
   */
  async tokenizer(
    load: (folder: string) => Promise<ChatTokenizer>,
    folder?: string,
    options: CallOptions = {},
  ): Promise<ChatTokenizer> {
    return await servedTokenizer(await this.serverInfo(options), load, folder);
  }

  /** End the connection. Sessions stay on the server until they are closed or have been idle for long. */
  close(): Promise<void> {
    this.#link.close();
    return Promise.resolve();
  }

  /** Closes the client. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }
}
