/** Keys and certificates, against the real server. */
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { connect, createServer as createPlainServer, type AddressInfo, type Server as PlainServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createServer, type Server } from "node:tls";

import { afterAll, beforeAll, expect, inject, test } from "vitest";

import { failure } from "../testing/moves.js";
import { openServer, type Guarded } from "../testing/servers.js";
import * as kakeya from "./index.js";

// A client that waits before trying again fails by time-out.
const NEVER_IN_TIME: kakeya.RetryPolicy = { firstDelaySeconds: 600, maxDelaySeconds: 600 };

let guarded: Guarded;
let another: Guarded;
let folder: string;

beforeAll(async () => {
  [guarded, another] = [
    await openServer<Guarded>(inject("control"), { guarded: true }),
    await openServer<Guarded>(inject("control"), { guarded: true }),
  ];
  folder = mkdtempSync(join(tmpdir(), "certificates-"));
  writeFileSync(join(folder, "ca.pem"), guarded.authority);
});
afterAll(() => {
  rmSync(folder, { recursive: true });
});

test.each(["path", "bytes"])("a key and the right authority, given as %s, open the door", async (how) => {
  const rootCertificates = how === "path" ? join(folder, "ca.pem") : Buffer.from(guarded.authority);
  await using client = new kakeya.Client(guarded.target, { apiKey: guarded.key, tls: { rootCertificates } });
  await using session = await client.createSession();
  await session.append([1, 2, 3]);
  expect((await session.generate(3).result()).generatedTokens).toBe(3);
});

test.each([undefined, "b".repeat(32)])("without the key it stays shut: %s", async (apiKey) => {
  const tls = { rootCertificates: Buffer.from(guarded.authority) };
  await using client = new kakeya.Client(guarded.target, { apiKey, tls });
  const error = await failure(kakeya.Unauthenticated, client.createSession());
  expect(error.code).toBe("UNAUTHENTICATED");
});

test("a server of an unknown authority is not talked to", async () => {
  for (const tls of [true, { rootCertificates: Buffer.from(another.authority) }]) {
    await using client = new kakeya.Client(guarded.target, { apiKey: guarded.key, tls, retry: NEVER_IN_TIME });
    const error = await failure(kakeya.TLSFailed, client.createSession());
    expect(error.message).toContain("its certificate is not accepted: unable to verify the first certificate");
  }
});

test("a certificate of another name is reported at once", async () => {
  const tls = { rootCertificates: Buffer.from(guarded.authority) };
  // The same server, by a name that is not in its certificate.
  await using client = new kakeya.Client(guarded.target.replace("127.0.0.1", "127.0.0.2"), {
    tls,
    retry: NEVER_IN_TIME,
  });
  const front = await forward(client.target, guarded.target);
  try {
    const error = await failure(kakeya.TLSFailed, client.serverInfo());
    expect(error.message).toContain("its certificate is for another name");
  } finally {
    front.close();
  }
});

test("plaintext to a port that speaks TLS says so", async () => {
  await using client = new kakeya.Client(guarded.target, { retry: NEVER_IN_TIME });
  const error = await failure(kakeya.TLSFailed, client.serverInfo());
  expect(error.message).toContain("it speaks TLS, and this client does not; give tls: true");
});

test("TLS to a port that speaks plaintext says so", async () => {
  await using client = new kakeya.Client(inject("target"), { tls: true, retry: NEVER_IN_TIME });
  const error = await failure(kakeya.TLSFailed, client.serverInfo());
  expect(error.message).toContain("it does not speak TLS; leave out tls");
});

test("a server that asks its clients for a certificate gets it", async () => {
  const front = await mutualTls(guarded.authority, guarded.certificate, inject("target"));
  try {
    const target = `127.0.0.1:${(front.address() as AddressInfo).port}`;
    const rootCertificates = Buffer.from(guarded.authority);
    const [certificate, key] = [Buffer.from(guarded.certificate), Buffer.from(guarded.certificate)];
    await using client = new kakeya.Client(target, { tls: { rootCertificates, certificate, key } });
    expect((await client.serverInfo()).modelId).toBe("tiny");
    await using without = new kakeya.Client(target, { tls: { rootCertificates }, retry: NEVER_IN_TIME });
    const error = await failure(kakeya.TLSFailed, without.serverInfo());
    expect(error.message).toContain("it asks its clients for a certificate");
  } finally {
    front.close();
  }
});

test("a key does not leave this machine in the clear", async () => {
  const elsewhere = [
    "10.1.2.3:1",
    "10.1:1",
    "127:1",
    "models.example.org:1",
    "localhost.example.org:1",
    "127.0.0.1.test:1",
  ];
  for (const target of [...elsewhere, "[fd00::1]:1", "[::ffff:10.0.0.1]:1", "[::7f00:1]:1", "localhost..:1"]) {
    const error = await failure(kakeya.InvalidArgument, () => new kakeya.Client(target, { apiKey: "k" }));
    expect(error.field).toBe("api_key");
  }
  const names = [
    "localhost:1",
    "LOCALHOST:1",
    "localhost.:1",
    "[::1]:1",
    "[0:0:0:0:0:0:0:1]:1",
    "[::ffff:127.0.0.1]:1",
  ];
  const numbers = ["127.0.0.1:1", "127.1:1", "0x7f.1:1", "2130706433:1", "0177.0.0.1:1", "127.0.0.1.:1"];
  for (const target of [...names, ...numbers, "0.0.0.0:1", "[::]:1", "[::FFFF:7f00:1]:1"]) {
    await new kakeya.Client(target, { apiKey: "k" }).close();
  }
});

test.each<[string, kakeya.TLS]>([
  ["authorities", { rootCertificates: Buffer.from("no PEM at all") }],
  ["a certificate and key", { certificate: Buffer.from("no PEM at all"), key: Buffer.from("nor this") }],
])("%s that are none are reported before anything is sent", async (_, tls) => {
  const error = await failure(kakeya.InvalidArgument, () => new kakeya.Client(guarded.target, { tls }));
  expect(error.message).toMatch(/cannot be used \(.+\); each is PEM text/);
});

test("a certificate file that is not there is Node's own error", () => {
  expect(() => new kakeya.Client("127.0.0.1:1", { tls: { rootCertificates: "nowhere.pem" } })).toThrow("ENOENT");
});

/** A second address of a server's. */
async function forward(from: string, to: string): Promise<PlainServer> {
  const [, port] = to.split(":");
  const front = createPlainServer((client) => {
    const server = connect(Number(port), "127.0.0.1");
    client.pipe(server).pipe(client);
    client.on("error", () => server.destroy());
    server.on("error", () => client.destroy());
  });
  const [host, own] = from.split(":");
  await new Promise<void>((ready) => front.listen(Number(own), host, ready));
  return front;
}

/** What stands in front of the runtime where clients have certificates. */
async function mutualTls(authority: string, certificate: string, target: string): Promise<Server> {
  const [host, port] = target.split(":");
  const front = createServer(
    { ca: authority, cert: certificate, key: certificate, requestCert: true, ALPNProtocols: ["h2"] },
    (client) => {
      const server = connect(Number(port), host);
      client.pipe(server).pipe(client);
      client.on("error", () => server.destroy());
      server.on("error", () => client.destroy());
    },
  );
  await new Promise<void>((ready) => front.listen(0, "127.0.0.1", ready));
  return front;
}
