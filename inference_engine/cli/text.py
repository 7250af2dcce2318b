"""Streams token ids as text to a terminal: no broken characters, no control sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console

_BROKEN = "\N{REPLACEMENT CHARACTER}"
# Control characters, except tab and newline, as Unicode's control pictures.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys(range(0x80, 0xA0), ord(_BROKEN))


class TextStream:
    """Decodes one Generate's ids piece by piece.

    A character can be spread over several tokens, and the text of a token can depend on the one before it. So a piece
    is what decoding adds to the tokens shown last, and is held back while its last character is incomplete.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # decoding starts here
        self._shown = 0  # ids before this one have been given out

    def push(self, token_id: int) -> str:
        """The text this id completes; "" if its last character needs more ids."""
        self._ids.append(token_id)
        text = self._added()
        if not text or text.endswith(_BROKEN):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text.translate(_VISIBLE)

    def end(self) -> str:
        """The rest, with an incomplete character replaced. Ends the stream."""
        text = self._added()
        self._start = self._shown = len(self._ids)
        return text.translate(_VISIBLE)

    def _added(self) -> str:
        before = self._decode(self._ids[self._start : self._shown])
        return self._decode(self._ids[self._start :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def shown_on(console: Console) -> Callable[[str], None]:
    """A function that writes pieces of text to `console` as they come, without line breaks or markup."""

    def show(piece: str) -> None:
        console.out(piece, end="", highlight=False)
        console.file.flush()

    return show
