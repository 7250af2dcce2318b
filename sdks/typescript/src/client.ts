/** A connection to a runtime. */
import { Link } from "./link.js";
import { known, type CallOptions, type ClientOptions, type CreateSessionOptions } from "./options.js";
import { createSessionRequest } from "./requests.js";
import { newRoute } from "./route.js";
import { Session } from "./session.js";
import { createdFacts, serverInfoOf, type ServerInfo } from "./values.js";

/**
 * A connection to a runtime, made by the first call. Closing it, or leaving the block of its `await using`, ends what
 * runs on it and closes no session.
 */
export class Client implements AsyncDisposable {
  readonly #link: Link;

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
    const route = newRoute();
    const patience = this.#link.patience(options, route);
    const reply = await this.#link.repeat((rpc, each) => rpc.createSession(request, each), patience);
    return Session.opened(this.#link, createdFacts(reply), route);
  }

  /** The server's model, limits and strategies, now. */
  async serverInfo(options: CallOptions = {}): Promise<ServerInfo> {
    const patience = this.#link.patience(known(options, "this call"));
    return serverInfoOf(await this.#link.repeat((rpc, each) => rpc.getServerInfo({}, each), patience));
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
