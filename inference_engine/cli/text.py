"""Streams token ids as text to a terminal: no broken characters, no control sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.cells import cell_len
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
    """A function that writes pieces of text to `console` as they come, without markup; words break on no terminal."""
    wrapped = _Wrapped(console.width) if console.is_terminal else None

    def show(piece: str) -> None:
        console.file.write(piece if wrapped is None else wrapped.laid_out(piece))
        console.file.flush()

    return show


class _Wrapped:
    """Lays out text that comes in pieces: a word that crosses the edge is taken back, and begins the next line."""

    def __init__(self, width: int) -> None:
        self._width = max(width - 1, 1)  # behind the last column a terminal waits with its break
        self._column = 0
        self._word = ""  # as much as has been shown of it

    def laid_out(self, piece: str) -> str:
        out = []
        for char in piece:
            cells = cell_len(char)
            if self._column + cells > self._width and char != "\n":
                taken = cell_len(self._word)
                if char == " ":
                    out.append("\n")
                    self._column, self._word = 0, ""
                    continue
                if 0 < taken < self._column:
                    out.append(f"\x1b[{taken}D\x1b[K\n{self._word}")
                    self._column = taken
                else:
                    out.append("\n")
                    self._column, self._word = 0, ""
            out.append(char)
            self._column = 0 if char == "\n" else self._column + cells
            # Behind a wide character, such as a Chinese one, a line may break.
            self._word = "" if char.isspace() or cells > 1 else self._word + char
        return "".join(out)
