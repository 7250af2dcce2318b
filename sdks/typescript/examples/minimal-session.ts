// The smallest whole program: open a session, append token ids, generate, append again.
//
//     npm install PACKAGE                   # what `npm pack` makes in sdks/typescript
//     node minimal-session.js [TARGET]      # what `npx tsc` makes of this file
import { Client } from "@kakeya/runtime";

await using client = new Client(process.argv[2]);
await using session = await client.createSession({ label: "minimal" });
await session.append([1, 2, 3, 4]);
for await (const tokenId of session.generate(16)) {
  process.stdout.write(`${tokenId} `);
}
const length = await session.append([5, 6]);
console.log(`\n${length} tokens in the history, at most ${session.peakBytes} bytes of K/V`);
