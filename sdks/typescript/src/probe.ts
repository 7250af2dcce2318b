/**
 * Why a server that accepts connections ends them unanswered: does one side speak TLS where the other does not?
 *
 * HTTP/2 says no more than that a stream was cancelled then. A handshake of our own, in which nothing is sent, says which
 * it is.
 */
import { connect } from "node:tls";

import type { TLS } from "./options.js";

const PROBE_MS = 2000;

export interface Mismatch {
  readonly problem: string;
  readonly isCertain: boolean;
}

/** What the two sides do not agree on, in words; undefined if nothing was found. */
export async function tlsMismatch(target: string, tls: TLS | boolean): Promise<Mismatch | undefined> {
  const isEncrypted = tls !== false;
  if (isEncrypted && tls !== true && tls.certificate !== undefined) return undefined;
  const met = await shakeHands(target);
  if (!isEncrypted && met !== "no TLS") {
    return { problem: "it speaks TLS, and this client does not; give tls: true or certificates", isCertain: true };
  }
  if (isEncrypted && met === "asked for a certificate") {
    return { problem: "it asks its clients for a certificate; tls: { certificate, key } gives one", isCertain: true };
  }
  if (isEncrypted && met === "left") {
    // What gRPC's own servers do without a certificate; but others may have other reasons.
    const problem =
      "it ends the connection after the handshake; if it asks its clients for a certificate, " +
      "tls: { certificate, key } gives one";
    return { problem, isCertain: false };
  }
  return undefined;
}

/** How a server takes a handshake without a certificate. */
type Met = "no TLS" | "TLS" | "asked for a certificate" | "left";

function shakeHands(target: string): Promise<Met> {
  const at = target.lastIndexOf(":");
  const host = target.slice(0, at).replace(/^\[|\]$/g, "");
  return new Promise((resolve) => {
    let met: Met = "no TLS";
    // Nothing is sent or trusted over this connection, so the peer need not be verified.
    const socket = connect({
      host,
      port: Number(target.slice(at + 1)),
      rejectUnauthorized: false,
      ALPNProtocols: ["h2"],
    });
    const end = (last: Met): void => {
      met = last;
      socket.destroy();
      resolve(met);
    };
    socket.setTimeout(PROBE_MS, () => {
      end(met);
    });
    socket.on("secureConnect", () => {
      met = "TLS";
    });
    // A server of HTTP/2 speaks first; one that misses a certificate complains, or leaves without a word.
    socket.on("data", () => {
      end("TLS");
    });
    socket.on("end", () => {
      end(met === "TLS" ? "left" : met);
    });
    socket.on("error", (error: NodeJS.ErrnoException) => {
      const words = `${error.code ?? ""} ${error.message}`;
      if (/certificate.required|handshake.failure/i.test(words)) end("asked for a certificate");
      else end(/alert/i.test(words) ? "TLS" : met === "TLS" ? "left" : met);
    });
  });
}
