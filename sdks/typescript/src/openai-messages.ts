/** Messages of the OpenAI chat API, checked and turned into what chat templates expect. */
import { shown } from "./checks.js";
import { InvalidMessages } from "./errors.js";

/** A chat message as templates read it. */
export type Message = Readonly<Record<string, unknown>>;

// What a message of each role may say.
const FIELDS: Readonly<Record<string, readonly string[]>> = {
  system: ["role", "content", "name"],
  developer: ["role", "content", "name"],
  user: ["role", "content", "name"],
  assistant: ["role", "content", "name", "tool_calls", "reasoning_content"],
  tool: ["role", "content", "name", "tool_call_id"],
};

/**
 * Messages in the format of the OpenAI chat API as the messages that chat templates expect.
 *
 * Roles system, developer (as system), user, assistant and tool. Content is text, or text parts, which are joined by
 * line ends. The JSON text of a tool call's arguments becomes an object. An assistant's `reasoning_content` stays, for
 * the template to show or leave out. Throws InvalidMessages with the path of what cannot be expressed: images and audio,
 * unknown roles or fields, arguments that are not a JSON object.
 */
export function fromOpenAIMessages(messages: readonly unknown[]): Message[] {
  if (!Array.isArray(messages)) {
    throw new InvalidMessages("messages", `must be a list of messages, got ${shown(messages)}`);
  }
  return messages.map((message, index) => convert(message, `messages[${index}]`));
}

function convert(message: unknown, path: string): Message {
  if (!isObject(message)) throw new InvalidMessages(path, `must be an object, got ${shown(message)}`);
  const role = message["role"];
  const fields = typeof role === "string" && Object.hasOwn(FIELDS, role) ? FIELDS[role] : undefined;
  if (fields === undefined) {
    throw new InvalidMessages(`${path}.role`, `must be one of ${Object.keys(FIELDS).join(", ")}; got ${shown(role)}`);
  }
  for (const [name, value] of Object.entries(message)) {
    // Replies of the API carry fields that say nothing: `"refusal": null`, `"annotations": []`.
    if (!fields.includes(name) && !isEmpty(value)) {
      throw new InvalidMessages(
        `${path}.${name}`,
        `cannot be expressed in a ${String(role)} message of a chat template`,
      );
    }
  }
  const calls = isEmpty(message["tool_calls"]) ? [] : message["tool_calls"];
  if (!Array.isArray(calls)) throw new InvalidMessages(`${path}.tool_calls`, `must be a list, got ${shown(calls)}`);
  const thinks = !isEmpty(message["reasoning_content"]);
  return {
    role: role === "developer" ? "system" : role,
    content: textOfContent(message["content"], `${path}.content`, calls.length > 0 || thinks),
    ...(thinks ? { reasoning_content: requiredText(message, "reasoning_content", path) } : {}),
    ...(calls.length === 0 ? {} : { tool_calls: calls.map((call, n) => toolCall(call, `${path}.tool_calls[${n}]`)) }),
    ...(role === "tool" ? { tool_call_id: requiredText(message, "tool_call_id", path) } : {}),
    ...(isEmpty(message["name"]) ? {} : { name: requiredText(message, "name", path) }),
  };
}

function textOfContent(content: unknown, path: string, mayBeMissing: boolean): string {
  if (typeof content === "string") return content;
  const isMissing = content === null || content === undefined || (Array.isArray(content) && content.length === 0);
  if (isMissing && mayBeMissing) return "";
  if (!Array.isArray(content) || content.length === 0) {
    throw new InvalidMessages(path, `must be text or a list of text parts, got ${shown(content)}`);
  }
  const texts = content.map((part: unknown, index) => {
    const kind = isObject(part) ? part["type"] : typeof part;
    const text = isObject(part) && kind === "text" ? part["text"] : undefined;
    if (typeof text !== "string") {
      throw new InvalidMessages(
        `${path}[${index}]`,
        `must be a text part, got ${shown(kind)}; the runtime's models read text`,
      );
    }
    return text;
  });
  return texts.join("\n");
}

function toolCall(call: unknown, path: string): Message {
  if (!isObject(call)) throw new InvalidMessages(path, `must be an object, got ${shown(call)}`);
  const called = call["function"];
  if ((call["type"] ?? "function") !== "function" || !isObject(called)) {
    throw new InvalidMessages(path, "must be a call of type 'function'");
  }
  const at = `${path}.function.arguments`;
  const given = called["arguments"];
  const parsed = typeof given === "string" ? parsedJson(given, at) : given;
  if (!isObject(parsed)) throw new InvalidMessages(at, `must be a JSON object, got ${shown(parsed)}`);
  return {
    id: requiredText(call, "id", path),
    type: "function",
    function: { name: requiredText(called, "name", `${path}.function`), arguments: { ...parsed } },
  };
}

function parsedJson(text: string, path: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new InvalidMessages(path, `is not JSON: ${String(error)}`);
  }
}

function requiredText(holder: Message, name: string, path: string): string {
  const value = holder[name];
  if (typeof value === "string" && value !== "") return value;
  throw new InvalidMessages(`${path}.${name}`, `must be a text that is not empty, got ${shown(value)}`);
}

function isObject(value: unknown): value is Message {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function isEmpty(value: unknown): boolean {
  if (value === undefined || value === null || value === "") return true;
  return typeof value === "object" && Object.keys(value).length === 0;
}
