"""From token ids to streamed text: no incomplete characters, no part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes, and a token at least one: so many may wait for the last one.
_MAX_WAITING_IDS = 3
# Decoding restarts after so many ids at the end of a character; after _MAX_WINDOW_IDS ids, anywhere.
_WINDOW_IDS = 16
_MAX_WINDOW_IDS = 64

Decode = Callable[[Sequence[int]], str]


class ReplyText:
    """Decodes ids one by one. The pieces joined are what decoding all ids at once gives.

    A character may be spread over several ids. Its piece waits for the last one. An incomplete character at the
    end is left out, and so is a replacement character that the model generated there: the two look alike.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0  # characters of the decoded ids that were given out
        self._context = 0  # ids before this one were given out; the next one's text may depend on the last of them

    def push(self, token_id: int) -> str:
        """The text this id completes."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        settled = self._settled(text)
        piece, self._shown = text[self._shown : settled], max(self._shown, settled)
        if piece and self._shown == len(text):
            if len(self._ids) >= _WINDOW_IDS:
                del self._ids[: self._context]
                self._shown = len(self._decode(self._ids))
            self._context = len(self._ids)
        elif len(self._ids) >= _MAX_WINDOW_IDS:
            waiting = len(text) - self._shown
            self._ids, self._context = self._ids[-_WINDOW_IDS:], 0
            self._shown = len(self._decode(self._ids)) - waiting
        return piece

    def _settled(self, text: str) -> int:
        """How many characters of `text` no later id can change."""
        if not text.endswith(_BROKEN):
            return len(text)
        before = text
        for waiting in range(1, _MAX_WAITING_IDS + 1):
            before = self._decode(self._ids[:-waiting])
            if not before.endswith(_BROKEN):
                return len(before)
        # Either these bytes are not valid text, or each token begins the character that the next one ends.
        common = zip(text, before, strict=False)
        return next((at for at, (one, other) in enumerate(common) if one != other), min(len(text), len(before)))


class StopStrings:
    """Passes text on until it contains one of `stops`, and nothing after that.

    The result does not depend on how the text is cut into pieces: the stop string that is complete first counts, of
    several the longest. A suffix that could begin a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._waiting = ""
        self.matched: str | None = None  # the one that ended the text

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """The text that can be sent now. may_stop: does a stop string count that is complete by now?"""
        if self.matched is not None:
            return ""
        text = self._waiting + piece
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends and may_stop:
            _, start, self.matched = min(ends)
            self._waiting = ""
            return text[:start]
        begun = max((_overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - begun
        self._waiting = text[cut:]
        return text[:cut]

    def end(self) -> str:
        """The text that was held back."""
        text, self._waiting = self._waiting, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)
