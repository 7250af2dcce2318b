/** What a network does to calls: a proxy in front of the real server that loses connections at a chosen moment. */
import { once } from "node:events";
import { connect, createServer, type AddressInfo, type Server, type Socket } from "node:net";

/** The moment at which the connection is lost, once. */
type Loss =
  | "request" // as the request leaves: the server never sees it
  | "answer" // as the answer comes: the server has done what it was asked
  | { readonly afterMessages: number }; // in the middle of a stream

const HEADERS = 1;
const DATA = 0;
const END_STREAM = 1;

export class Proxy {
  readonly #server: Server;
  readonly #sockets = new Set<Socket>();
  #loss: Loss | undefined = undefined;
  #refusals = 0;
  connections = 0;

  private constructor(server: Server, target: string) {
    this.#server = server;
    server.on("connection", (client: Socket) => {
      this.#join(client, target);
    });
  }

  static async before(target: string): Promise<Proxy> {
    const server = createServer();
    const proxy = new Proxy(server, target);
    server.listen(0, "127.0.0.1");
    await once(server, "listening");
    return proxy;
  }

  get target(): string {
    return `127.0.0.1:${(this.#server.address() as AddressInfo).port}`;
  }

  /** Lose the connection at this moment of what is called next. */
  lose(loss: Loss): void {
    this.#loss = loss;
  }

  /** Turn away the next connections. */
  refuse(count: number): void {
    this.#refusals = count;
  }

  async close(): Promise<void> {
    this.#server.close();
    for (const socket of this.#sockets) socket.destroy();
    await once(this.#server, "close");
  }

  #join(client: Socket, target: string): void {
    this.connections += 1;
    if (this.#refusals > 0) {
      this.#refusals -= 1;
      client.destroy();
      return;
    }
    const [host, port] = target.split(":");
    const server = connect(Number(port), host);
    const end = (): void => {
      client.destroy();
      server.destroy();
    };
    for (const socket of [client, server]) {
      this.#sockets.add(socket);
      socket.on("error", end);
      socket.on("close", () => {
        this.#sockets.delete(socket);
        end();
      });
    }
    let messages = 0;
    const upwards = framesOf((type) => {
      if (type === HEADERS && this.#loss === "request") {
        this.#loss = undefined;
        end();
      }
    });
    // Bytes come first with the connection's preface, which is no frame.
    let preface = 24;
    client.on("data", (bytes: Buffer) => {
      const skipped = Math.min(preface, bytes.length);
      preface -= skipped;
      upwards(bytes.subarray(skipped));
      if (!server.destroyed) server.write(bytes);
    });
    const downwards = framesOf((type, flags) => {
      messages += type === DATA ? 1 : 0;
      const isLost =
        this.#loss === "answer"
          ? type === HEADERS && (flags & END_STREAM) !== 0
          : typeof this.#loss === "object" && messages > this.#loss.afterMessages;
      if (isLost) {
        this.#loss = undefined;
        end();
      }
    });
    server.on("data", (bytes: Buffer) => {
      const isSwallowed = this.#loss === "answer";
      downwards(bytes);
      if (!isSwallowed && !client.destroyed) client.write(bytes);
    });
  }
}

/** Takes bytes of HTTP/2 as they come and reports each frame, once it is whole. */
function framesOf(onFrame: (type: number, flags: number) => void): (bytes: Buffer) => void {
  let held = Buffer.alloc(0);
  return (bytes) => {
    held = Buffer.concat([held, bytes]);
    while (held.length >= 9 && held.length >= 9 + held.readUIntBE(0, 3)) {
      const [type, flags, end] = [held.readUInt8(3), held.readUInt8(4), 9 + held.readUIntBE(0, 3)];
      held = held.subarray(end);
      onFrame(type, flags);
    }
  };
}
