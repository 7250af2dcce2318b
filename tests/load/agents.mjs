// Agents of the TypeScript SDK, which talk on while their server is killed; `kills.py` holds what they say against the law.
//
//     node tests/load/agents.mjs <target> <agents> <seed> <seconds of patience> <seconds of rest> <seconds of a wait> [<file of authorities>]
//
// Each line on standard output is what an agent received. The end of standard input lets each end its session.
import { setTimeout as sleep } from "node:timers/promises";
import { Client, DeadlineExceeded, SessionNotFound, TransportError } from "../../sdks/typescript/dist/index.js";

const MOST_TOKENS = 250; // of one session
const FORKING = 30; // of a hundred turns
const REWINDING = 10;
const RESTING = 5;

const target = process.argv[2];
const [agents, seed, patienceSeconds, restSeconds, noticedSeconds] = process.argv.slice(3, 8).map(Number);
const authorities = process.argv[8];
let isOver = false;
process.stdin.on("end", () => (isOver = true)).resume();

/** Numbers below `end`, the same for the same seed (xorshift32). */
function numbers(seed) {
  let state = seed >>> 0 || 1;
  return (end) => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return (state >>> 0) % end;
  };
}

function tell(agent, line) {
  process.stdout.write(`${JSON.stringify({ agent, ...line })}\n`);
}

/** A session and a fork of it, by turns, from its creation to their end. */
async function talk(client, agent, below) {
  const created = await client.createSession();
  tell(agent, { session: created.id, created: true });
  const sessions = [created];
  while (sessions.length > 0) {
    const at = below(sessions.length);
    let session = sessions[at];
    if (session.historyLength >= MOST_TOKENS || isOver) {
      sessions.splice(at, 1);
      await end(client, agent, session);
      continue;
    }
    if (session.historyLength > 0 && sessions.length === 1 && below(100) < FORKING) {
      const fork = await session.fork();
      tell(agent, { session: session.id, forked: fork.id, length: fork.historyLength });
      sessions.push(fork);
    }
    if (below(100) < RESTING) await rest(client, agent, session);
    if (session.historyLength > 0 && below(100) < REWINDING) {
      const position = below(session.historyLength + 1);
      const rewound = await session.rewind(position);
      tell(agent, { session: session.id, rewound: rewound.id, position, length: rewound.historyLength });
      sessions[at] = session = rewound;
    }
    await turn(agent, session, below);
  }
}

async function turn(agent, session, below) {
  const ids = Array.from({ length: 1 + below(29) }, () => below(256));
  const waits = [];
  let began = Date.now() / 1000;
  const waited = () => {
    const now = Date.now() / 1000;
    if (now - began > noticedSeconds) waits.push([began, now]);
    began = now;
  };
  tell(agent, { session: session.id, appended: ids, length: await session.append(ids) });
  waited();
  const most = 1 + below(39);
  const isDrawn = below(2) === 1;
  const stream = session.generate(most, isDrawn ? { temperature: 1 } : {});
  const received = [];
  for await (const token of stream) {
    received.push(token);
    waited();
  }
  const done = await stream.result();
  const seed = isDrawn ? String(done.seed) : null;
  tell(agent, { session: session.id, received, most, seed, waits, length: done.historyLength });
}

/** Long enough to leave memory; then the history comes back as it was. */
async function rest(client, agent, session) {
  await sleep(1000 * restSeconds);
  let resident = false;
  let length;
  for await (const one of client.sessions()) {
    if (one.id === session.id) [resident, length] = [one.isResident, one.historyLength];
  }
  const history = [];
  for await (const piece of session.history()) history.push(...piece.tokenIds);
  tell(agent, { session: session.id, history, resident, length });
}

async function end(client, agent, session) {
  tell(agent, { session: session.id, length: (await session.info()).historyLength });
  const closed = await session.close();
  let gone = false;
  try {
    await client.session(session.id);
  } catch (error) {
    if (!(error instanceof SessionNotFound)) throw error;
    gone = true;
  }
  tell(agent, { session: session.id, closed, gone });
}

async function run(agent) {
  const below = numbers(seed * 1000 + agent * 7919 + 1);
  for (let warm = 0; warm < 8; warm++) below(1);
  const client = new Client(target, {
    retry: { firstDelaySeconds: 0.02, maxDelaySeconds: 0.1, patienceSeconds },
    timeoutSeconds: 1200,
    tls: authorities === undefined ? false : { rootCertificates: authorities },
  });
  try {
    while (!isOver) await talk(client, agent, below);
  } catch (error) {
    const isUnanswered = error instanceof TransportError || error instanceof DeadlineExceeded;
    tell(agent, { [isUnanswered ? "unanswered" : "wrong"]: `${error.name}: ${error.message}` });
  } finally {
    await client.close();
  }
}

await Promise.all(Array.from({ length: agents }, (_, agent) => run(agent)));
