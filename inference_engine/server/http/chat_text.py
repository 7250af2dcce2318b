"""What the shim knows of text: the tokenizer and the chat template in the model's folder.

Ids are what the tokenizer gives for the rendered messages, as the Python SDK has them, so an answer over HTTP is that
of a session whose history is these ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference_engine.errors import InvalidArgument, ModelError
from inference_engine.server.http.template import MAX_SECONDS, ChatTemplate, Message
from inference_engine.server.http.text import TextStream

# Words that no template trims, escapes or takes for markup.
_QUESTION, _ANSWER = "The quick brown fox", "Kqzwxjvbm"
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class ChatText:
    """`prompt_ids` belongs to one thread at a time and may block it; the rest is quick and safe from any."""

    def __init__(self, tokenizer: Any, *, name: str, max_render_seconds: float = MAX_SECONDS) -> None:
        """Raises ModelError if `tokenizer` (transformers') cannot chat. `name` says whose it is."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(f"{name}: its tokenizer has no tokenizer.json, which chatting over HTTP needs")
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                f"{name} has no chat template: it continues text, it cannot chat; leave http_bind unset, or serve an "
                "instruct model"
            )
        # Set once: from here on the tokenizer only reads itself, so threads may share it.
        backend.no_truncation()
        backend.no_padding()
        self._tokens = backend
        self._template = ChatTemplate(
            tokenizer.get_chat_template(), tokenizer.special_tokens_map, max_seconds=max_render_seconds
        )
        self._added: dict[str, int] = tokenizer.added_tokens_encoder
        self.end_ids = self._end_ids(tokenizer)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The conversation up to where the assistant is to speak. Raises InvalidArgument as the template does."""
        return self._encode(self._template.render(messages))

    def text_stream(self) -> TextStream:
        return TextStream(self._decode)

    def token_id(self, text: str) -> int | None:
        """The id of a text that is an added token on its own, such as `<|im_end|>`; such ids never show as text."""
        return self._added.get(text)

    def token_text(self, token_id: int) -> tuple[str, list[int] | None]:
        """A token on its own and its UTF-8 bytes; of half a character the vocabulary's name for it, and None."""
        text = self._tokens.decode([token_id], skip_special_tokens=False)
        if _BROKEN in text:
            return str(self._tokens.id_to_token(token_id)), None
        return text, list(text.encode())

    def close(self) -> None:
        """End the template's process; it starts again if it is needed."""
        self._template.close()

    def _end_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """Ids that end the assistant's turn: the tokenizer's own, and what the template puts after its words."""
        own = tokenizer.eos_token_id
        ids = list(own) if isinstance(own, (list, tuple)) else [] if own is None else [own]
        conversation = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
        try:
            text = self._template.render(conversation, add_generation_prompt=False)
        except InvalidArgument as error:
            raise ModelError(f"the model's chat template renders no plain conversation: {error.description}") from None
        head, found, _ = text.rpartition(_ANSWER)
        if not found:
            raise ModelError("the model's chat template does not show what the assistant said")
        begun, whole = self._encode(head + found), self._encode(text)
        after = whole[len(begun) : len(begun) + 1]
        # A turn that ends in plain text has no token of its own for that.
        ids += [token_id for token_id in after if token_id in self._added.values()]
        return tuple(dict.fromkeys(ids))

    def _encode(self, text: str) -> list[int]:
        # The template has written all special tokens. Of the ways to encode, those of batches let other threads run.
        ids: list[int] = self._tokens.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokens.decode(token_ids, skip_special_tokens=True))


def load_chat_text(folder: Path) -> ChatText:
    """The tokenizer and template in a model's folder, which was checked before. Runs no code from it, asks no network.

    Raises ModelError if they cannot be loaded or cannot chat.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} holds no tokenizer that can be loaded: {error}") from error
    return ChatText(tokenizer, name=folder.name)
