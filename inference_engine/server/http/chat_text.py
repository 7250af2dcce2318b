"""Text in the shim: the tokenizer and the chat template in the model's folder.

Ids are those of the tokenizer for the rendered messages, equal to the Python SDK's, so an answer over HTTP equals that
of a session with this history. Encoding runs in processes with limits on time and memory; decoding runs here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inference_engine.errors import ModelError
from inference_engine.server.http.template import MAX_SECONDS, MAX_TEMPLATE_CHARACTERS, ChatTemplate, Message
from inference_engine.server.http.turn_ends import end_of_turn, template_of
from inference_engine.session.history import TokenIds
from kakeya import TokenizerError
from kakeya.tokenization import ReplyText, load_tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"
# Per file of the tokenizer; a large vocabulary takes 40 MB.
_MAX_FILE_BYTES = 2**27

# While one owner's slow text occupies a process, other owners' texts are rendered by the other.
PROCESSES = 2


class ChatText:
    """`prompt_ids` blocks, one thread for each process. All other methods are fast and safe from any thread."""

    def __init__(
        self, tokenizer: Any, *, name: str, max_render_seconds: float = MAX_SECONDS, processes: int = PROCESSES
    ) -> None:
        """tokenizer: of `load_tokenizer`. Raises ModelError if it has no chat template. name: of its model."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(
                f"{name}: its tokenizer has no tokenizer.json, which chat over HTTP needs; leave http_bind unset"
            )
        # Set once: from here on the tokenizer is only read, so threads may share it.
        backend.no_truncation()
        backend.no_padding()
        self._tokens = backend
        self._added = {token.content: at for at, token in tokenizer.added_tokens_decoder.items()}
        template = template_of(tokenizer.chat_template, name)
        if template is None:
            raise ModelError(
                f"{name} has no chat template, so it cannot chat; leave http_bind unset, or serve an instruct model"
            )
        own = [getattr(tokenizer, f"{kind}_token_id", None) for kind in ("eos", "eot", "eom")]
        flat = [at for one in own for at in (one if isinstance(one, (list, tuple)) else [one])]
        own_ends = list(dict.fromkeys(at for at in flat if at is not None))
        given = {
            "specification": backend.to_str(),
            "added": [[at, token.content, token.special] for at, token in tokenizer.added_tokens_decoder.items()],
            "end_ids": own_ends,
            "unknown_id": tokenizer.unk_token_id,
        }
        self._templates = tuple(
            ChatTemplate(template, tokenizer.special_tokens_map, tokenizer=given, max_seconds=max_render_seconds)
            for _ in range(processes)
        )
        try:
            end = end_of_turn(self._templates[0], self._added)
            self.end_ids = tuple(dict.fromkeys([*own_ends, *([] if end is None else [end])]))
        except ModelError as error:
            self.close()
            raise ModelError(
                f"{name}: {error}; leave http_bind unset, or put a template for contents that are texts into "
                "chat_template.jinja"
            ) from None
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
        """The conversation up to the assistant's turn. Raises what `ChatTemplate.encode` does."""
        return self._templates[process].encode(messages, most_ids, allow_special_tokens=allow_special_tokens)

    def start(self) -> None:
        """Start every process. Blocks. Raises ModelError."""
        for template in self._templates:
            template.start()

    def text_stream(self) -> ReplyText:
        return ReplyText(self._decode)

    def token_id(self, text: str) -> int | None:
        """The id of a text that is an added token on its own, such as `<|im_end|>`; such ids never appear as text."""
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

    def _decode(self, token_ids: Sequence[int]) -> str:
        with _panics_are_errors():
            return str(self._tokens.decode(token_ids, skip_special_tokens=True))


@contextmanager
def _panics_are_errors() -> Iterator[None]:
    """Turns a panic of the tokenizers' library, a BaseException that no error handler catches, into RuntimeError."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ != "PanicException":
            raise
        raise RuntimeError("the model's tokenizer failed") from error


def load_chat_text(folder: Path, *, name: str) -> ChatText:
    """The tokenizer and template in a model's folder, which was checked before. Runs no code of it, uses no network.

    name: of the model; a GGUF file's tokenizer is in a folder of the cache. Raises ModelError if they cannot be loaded
    or cannot chat.
    """
    # Tried in a limited process first: in this one, loading could take any time and memory.
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
    try:
        tokenizer = load_tokenizer(folder)
    except TokenizerError as error:
        raise ModelError(str(error)) from error
    return ChatText(tokenizer, name=name)


def _check_size(path: Path, most: int) -> None:
    if path.is_file() and (size := path.stat().st_size) > most:
        raise ModelError(f"{path} has {size} bytes; the limit is {most}")
