/**
 * A TypeScript author's client from before anything was added to the contract: one session, some turns, close.
 *
 *     node client.js <target> <scenario>
 *
 * `generated/` is made from proto/frozen by the test. Requests come and answers are printed in protobuf's JSON form, as
 * with its Python sibling.
 */
import { fromJson, toJson, type JsonObject, type JsonValue } from "@bufbuild/protobuf";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

import {
  AppendTokensRequestSchema,
  AppendTokensResponseSchema,
  CloseSessionResponseSchema,
  CreateSessionRequestSchema,
  GenerateRequestSchema,
  GenerateResponseSchema,
  GetSessionInfoResponseSchema,
  RuntimeService,
} from "./generated/kakeya/v1/runtime_pb.js";

interface Turn {
  append: JsonObject;
  generate: JsonObject;
  /** Break the stream off after this many frames. */
  leaveAfter?: number;
}

interface Scenario {
  create: JsonObject;
  turns: Turn[];
}

const [target, text] = process.argv.slice(2);
if (target === undefined || text === undefined) {
  throw new Error("usage: client.js <target> <scenario>");
}
const scenario = JSON.parse(text) as Scenario;
const client = createClient(
  RuntimeService,
  createGrpcTransport({ baseUrl: `http://${target}`, defaultTimeoutMs: 30_000 }),
);
const written = { alwaysEmitImplicit: true };

async function take(sessionId: string, turn: Turn): Promise<JsonValue> {
  const appended = await client.appendTokens(fromJson(AppendTokensRequestSchema, { ...turn.append, sessionId }));
  // To break out of the loop would leave the stream running: Connect's iterators end by signal only.
  const leave = new AbortController();
  const request = fromJson(GenerateRequestSchema, { ...turn.generate, sessionId });
  const stream = client.generate(request, { signal: leave.signal });
  const frames: JsonValue[] = [];
  try {
    for await (const frame of stream) {
      frames.push(toJson(GenerateResponseSchema, frame, written));
      if (frames.length === turn.leaveAfter) {
        leave.abort();
      }
    }
  } catch (error) {
    if (ConnectError.from(error).code !== Code.Canceled) {
      throw error;
    }
  }
  const info = await client.getSessionInfo({ sessionId });
  return {
    appended: toJson(AppendTokensResponseSchema, appended, written),
    frames,
    info: toJson(GetSessionInfoResponseSchema, info, written),
  };
}

/** The status code a call ends with; 0 is OK. */
async function statusOf(call: Promise<unknown>): Promise<number> {
  try {
    await call;
    return 0;
  } catch (error) {
    return ConnectError.from(error).code;
  }
}

async function readAll(stream: AsyncIterable<unknown>): Promise<void> {
  for await (const frame of stream) {
    void frame;
  }
}

const { sessionId } = await client.createSession(fromJson(CreateSessionRequestSchema, scenario.create));
const turns: JsonValue[] = [];
for (const turn of scenario.turns) {
  turns.push(await take(sessionId, turn));
}
const closed = await client.closeSession({ sessionId });
const afterwards = {
  AppendTokens: await statusOf(client.appendTokens({ sessionId, tokenIds: [1] })),
  Generate: await statusOf(readAll(client.generate({ sessionId, maxTokens: 1 }))),
  CloseSession: await statusOf(client.closeSession({ sessionId })),
  GetSessionInfo: await statusOf(client.getSessionInfo({ sessionId })),
};
console.log(
  JSON.stringify({
    methods: RuntimeService.methods.map((method) => method.name),
    turns,
    closed: toJson(CloseSessionResponseSchema, closed, written),
    afterwards,
  }),
);
