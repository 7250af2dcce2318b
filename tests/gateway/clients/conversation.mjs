// One conversation by a published client: node conversation.mjs CLIENT URL MODEL TURNS. A line of JSON for each turn.

import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText } from "ai";
import OpenAI from "openai";

const [client, baseURL, model, turns] = process.argv.slice(2);
const settings = { baseURL, apiKey: "none" };
const openai = new OpenAI({ ...settings, maxRetries: 0 });
const provider = createOpenAI(settings);
const messages = [];
let previous;

const ofUsage = (usage) => ({
  read: usage.prompt_tokens ?? usage.input_tokens,
  cached: (usage.prompt_tokens_details ?? usage.input_tokens_details).cached_tokens,
  written: usage.completion_tokens ?? usage.output_tokens,
});

async function withModel(model) {
  const asked = { model, messages, maxOutputTokens: 8, maxRetries: 0 };
  const answer = messages.length % 4 === 1 ? await generateText(asked) : streamText(asked);
  const usage = await answer.usage;
  messages.push(...(await answer.response).messages);
  return { read: usage.inputTokens, cached: usage.cachedInputTokens, written: usage.outputTokens };
}

const CLIENTS = {
  "openai chat": async () => {
    const answer = await openai.chat.completions.create({ model, messages, max_tokens: 8 });
    messages.push(answer.choices[0].message);
    return ofUsage(answer.usage);
  },
  "openai responses": async (input) => {
    const asked = { model, input, max_output_tokens: 8, previous_response_id: previous };
    const answer = await openai.responses.stream(asked).finalResponse();
    previous = answer.id;
    return ofUsage(answer.usage);
  },
  "ai chat": () => withModel(provider.chat(model)),
  "ai responses": () => withModel(provider.responses(model)),
};

for (let turn = 0; turn < Number(turns); turn++) {
  const content = `Turn ${turn}, if you please.`;
  messages.push({ role: "user", content });
  console.log(JSON.stringify(await CLIENTS[client](content)));
}
