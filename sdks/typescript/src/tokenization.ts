/**
 * Chat messages to token ids, on the client's side: what `@kakeya/runtime/tokenization` exports.
 *
 * `loadTokenizer` needs `npm install @huggingface/tokenizers @huggingface/jinja`; the rest takes any ChatTokenizer.
 */
export {
  endOfTurnIds,
  loadTokenizer,
  tokensForChat,
  tokensForNextTurn,
  type AddedToken,
  type ChatOptions,
  type ChatTokenizer,
  type NextTurnOptions,
  type TemplateOptions,
} from "./chat-tokens.js";
export { fromOpenAIMessages, type Message } from "./openai-messages.js";
export { ReplyText, StopStrings } from "./reply-text.js";
