// Agents of the TypeScript SDK, which talk on while their server is killed; `kills.py` holds what they say against the law.
//
//     node tests/load/agents.mjs <target> <agents> <seed> <seconds of patience>
//
// Each line on standard output is what an agent received. The end of standard input lets each end its session.
import { Client, DeadlineExceeded, TransportError } from "../../sdks/typescript/dist/index.js";

const MOST_TOKENS = 250; // of one session

const target = process.argv[2];
const [agents, seed, patienceSeconds] = process.argv.slice(3).map(Number);
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

/** One session, from its creation to its end. */
async function talk(client, agent, below) {
  const session = await client.createSession();
  tell(agent, { created: session.id });
  let length = 0;
  while (length < MOST_TOKENS && !isOver) {
    const ids = Array.from({ length: 1 + below(29) }, () => below(256));
    tell(agent, { appended: ids, length: (length = await session.append(ids)) });
    const most = 1 + below(39);
    const isDrawn = below(2) === 1;
    const stream = session.generate(most, isDrawn ? { temperature: 1 } : {});
    const received = [];
    for await (const token of stream) received.push(token);
    const done = await stream.result();
    length = done.historyLength;
    tell(agent, { received, most, seed: isDrawn ? String(done.seed) : null, length });
  }
  tell(agent, { length: (await session.info()).historyLength });
  tell(agent, { closed: await session.close() });
}

async function run(agent) {
  const below = numbers(seed * 1000 + agent * 7919 + 1);
  for (let warm = 0; warm < 8; warm++) below(1);
  const client = new Client(target, {
    retry: { firstDelaySeconds: 0.02, maxDelaySeconds: 0.1, patienceSeconds },
    timeoutSeconds: 1200,
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
