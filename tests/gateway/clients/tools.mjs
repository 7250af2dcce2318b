// A tool that is called and answered, by the AI SDK: node tools.mjs API URL MODEL. A line of JSON for each way.

import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [api, baseURL, name] = process.argv.slice(2);
const provider = createOpenAI({ baseURL, apiKey: "none" });
const model = api === "chat" ? provider.chat(name) : provider.responses(name);
const weather = tool({
  inputSchema: z.object({ town: z.enum(["Brno", "Oslo"]) }),
  execute: async ({ town }) => `${town} is wet.`,
});

for (const write of [generateText, streamText]) {
  const answer = await write({
    model,
    prompt: "Brno?",
    maxOutputTokens: 80,
    maxRetries: 0,
    tools: { weather },
    toolChoice: { type: "tool", toolName: "weather" },
    prepareStep: ({ stepNumber }) => (stepNumber > 0 ? { toolChoice: "none" } : {}),
    stopWhen: stepCountIs(2),
  });
  const [first, second] = await answer.steps;
  const [{ toolName, input, output }] = first.toolResults;
  const before = first.usage.inputTokens + first.usage.outputTokens;
  console.log(JSON.stringify({ toolName, input, output, before, cached: second.usage.cachedInputTokens }));
}
