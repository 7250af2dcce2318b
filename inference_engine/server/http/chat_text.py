"""What the shim knows of text: the tokenizer and the chat template in the model's folder.

Ids are what the tokenizer gives for the rendered messages, as the Python SDK has them, so an answer over HTTP is that
of a session whose history is these ids. They are made in processes with limits on time and memory; here, ids become
text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inference_engine.errors import ModelError, RequestError
from inference_engine.server.http.template import MAX_SECONDS, MAX_TEMPLATE_CHARACTERS, ChatTemplate, Message
from inference_engine.server.http.text import TextStream
from inference_engine.session.history import TokenIds

# Words that no template trims, escapes or takes for markup.
_QUESTION, _ANSWER = "The quick brown fox", "Kqzwxjvbm"
_BROKEN = "\N{REPLACEMENT CHARACTER}"
# Of each file that is read for the tokenizer; that of a large vocabulary has 40 MB.
_MAX_FILE_BYTES = 2**27

# While one owner's slow text holds a process, another's is rendered by the other.
PROCESSES = 2


class ChatText:
    """`prompt_ids` belongs to one thread for each process and may block it; the rest is quick and safe from any."""

    def __init__(
        self, tokenizer: Any, *, name: str, max_render_seconds: float = MAX_SECONDS, processes: int = PROCESSES
    ) -> None:
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
        self._added: dict[str, int] = tokenizer.added_tokens_encoder
        template = tokenizer.get_chat_template()
        own = tokenizer.eos_token_id
        self._own_ends = list(own) if isinstance(own, (list, tuple)) else [] if own is None else [own]
        given = {
            "specification": backend.to_str(),
            "added": [[at, token.content, token.special] for at, token in tokenizer.added_tokens_decoder.items()],
            "end_ids": self._own_ends,
            "unknown_id": tokenizer.unk_token_id,
        }
        self._templates = tuple(
            ChatTemplate(template, tokenizer.special_tokens_map, tokenizer=given, max_seconds=max_render_seconds)
            for _ in range(processes)
        )
        try:
            self.end_ids = self._end_ids()
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> int:
        return len(self._templates)

    def prompt_ids(
        self,
        messages: Sequence[Message],
        most_ids: int | None = None,
        *,
        allow_special_tokens: bool = False,
        process: int = 0,
    ) -> TokenIds:
        """The conversation up to where the assistant is to speak. Raises what `ChatTemplate.encode` does."""
        return self._templates[process].encode(messages, most_ids, allow_special_tokens=allow_special_tokens)

    def start(self) -> None:
        """Have every process ready. Blocks. Raises ModelError."""
        for template in self._templates:
            template.start()

    def text_stream(self) -> TextStream:
        return TextStream(self._decode)

    def token_id(self, text: str) -> int | None:
        """The id of a text that is an added token on its own, such as `<|im_end|>`; such ids never show as text."""
        return self._added.get(text)

    def token_text(self, token_id: int) -> tuple[str, list[int] | None]:
        """A token on its own and its UTF-8 bytes; of half a character the vocabulary's name for it, and None."""
        with _panics_are_errors():
            text = self._tokens.decode([token_id], skip_special_tokens=False)
        if _BROKEN in text:
            return str(self._tokens.id_to_token(token_id)), None
        return text, list(text.encode())

    def close(self) -> None:
        """End the processes, for good unless `start` is called."""
        for template in self._templates:
            template.close()

    def _end_ids(self) -> tuple[int, ...]:
        """Ids that end the assistant's turn: the tokenizer's own, and what the template puts after its words."""
        ids = list(self._own_ends)
        conversation = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
        try:
            text = self._templates[0].render(conversation, add_generation_prompt=False)
            head, found, _ = text.rpartition(_ANSWER)
            if not found:
                raise ModelError("the model's chat template does not show what the assistant said")
            # The template has written all special tokens.
            begun, whole = (self._templates[0].encode_text(each) for each in (head + found, text))
        except RequestError as error:
            raise ModelError(f"the model's chat template renders no plain conversation: {error.message}") from None
        after = whole[len(begun) : len(begun) + 1].tolist()
        # A turn that ends in plain text has no token of its own for that.
        ids += [token_id for token_id in after if token_id in self._added.values()]
        return tuple(dict.fromkeys(ids))

    def _decode(self, token_ids: Sequence[int]) -> str:
        with _panics_are_errors():
            return str(self._tokens.decode(token_ids, skip_special_tokens=True))


@contextmanager
def _panics_are_errors() -> Iterator[None]:
    """A panic of the tokenizers' library is a BaseException, which would pass by everything that answers errors."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ != "PanicException":
            raise
        raise RuntimeError("the model's tokenizer failed") from error


def load_chat_text(folder: Path) -> ChatText:
    """The tokenizer and template in a model's folder, which was checked before. Runs no code from it, asks no network.

    Raises ModelError if they cannot be loaded or cannot chat.
    """
    # In this process it would take what time and memory it likes.
    for path in (*folder.glob("*.json"), *folder.glob("*.txt")):
        _check_size(path, _MAX_FILE_BYTES)
    for path in folder.rglob("*.jinja"):
        _check_size(path, 4 * MAX_TEMPLATE_CHARACTERS)  # characters of UTF-8
    file = folder / "tokenizer.json"
    if file.is_file():
        trial = ChatTemplate("", {}, tokenizer={"file": str(file)})
        try:
            trial.start()
        finally:
            trial.close()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} holds no tokenizer that can be loaded: {error}") from error
    return ChatText(tokenizer, name=folder.name)


def _check_size(path: Path, most: int) -> None:
    if path.is_file() and (size := path.stat().st_size) > most:
        raise ModelError(f"{path}: {size} bytes, more than the {most} such a file may have")
