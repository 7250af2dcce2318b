"""A tool format over one tokenizer: which of its markers are tokens, and where a call begins.

A marker that the tokenizer has as a token of its own is written, and found, as that id: what users or tools say can
spell it, and is text all the same. In the texts of a format each such token is one character, half of a surrogate pair,
which no text that was decoded can hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kakeya._tool_format import ID, FieldSyntax, ToolFormat, common

# High halves: no text begins with a low one, so no two characters become one.
_FIRST_MARK = 0xD800
ID_MARK = "\udb7f"
# Of Harmony, whose messages have headers.
START, CHANNEL, CONSTRAIN, MESSAGE, END = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"
SPEAKER = "assistant"
_MARKUP = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


class Markers:
    """The tokens that stand in a format, as characters."""

    def __init__(self, texts: Iterable[str], tokens: Mapping[str, int]) -> None:
        """tokens: the tokenizer's own ones, by their text."""
        joined = "\n".join(texts)
        held = sorted((token for token in tokens if token in joined), key=len, reverse=True)
        self.id_of = {chr(_FIRST_MARK + at): tokens[token] for at, token in enumerate(held)}
        self.text_of = {chr(_FIRST_MARK + at): token for at, token in enumerate(held)}
        self.mark_of = {token_id: mark for mark, token_id in self.id_of.items()}
        self._mark_of_text = {token: mark for mark, token in self.text_of.items()}
        self._find = re.compile("|".join(map(re.escape, held)) or r"(?!)")

    def marked(self, text: str) -> str:
        """The text with its tokens as characters, and a call's id as one."""
        return self._find.sub(lambda found: self._mark_of_text[found.group()], text).replace(ID, ID_MARK)

    def shown(self, marked: str) -> str:
        """As it reads."""
        return "".join(self.text_of.get(each, each) for each in marked).replace(ID_MARK, ID)


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkedFormat:
    """A format whose texts are marked.

    trigger: what a call begins with wherever it stands, and `begin` goes on behind it; empty where a call has to be the
    first that is said. has_channels: are there messages with headers, as in Harmony? tail: what follows every value of
    `fields`, whose `between` and `end` go on behind it.
    """

    markers: Markers
    trigger: str
    begin: str
    middle: str
    end: str
    between: str | None
    fields: FieldSyntax | None
    tail: str
    call_id: str | None
    has_channels: bool

    @classmethod
    def of(cls, given: ToolFormat, tokens: Mapping[str, int]) -> MarkedFormat:
        fields, tail = given.fields, ""
        named = (fields.after_name, fields.between, fields.empty, fields.open, fields.close) if fields else ()
        has_channels = CHANNEL in given.middle and MESSAGE in given.middle
        headers = (START, CHANNEL, CONSTRAIN, MESSAGE, END) if has_channels else ()
        markers = Markers((given.begin, given.middle, given.end, given.between or "", *named, *headers), tokens)
        marked = markers.marked
        begin, end, between = marked(given.begin), marked(given.end), None
        if given.between is not None:
            between = marked(given.between)
        if fields is not None:
            fields = replace(
                fields,
                after_name=marked(fields.after_name),
                between=marked(fields.between),
                empty=marked(fields.empty),
                open=marked(fields.open),
                close=marked(fields.close),
            )
            tail = end[: common(end, fields.between)]
            # A further call is behind a whole one.
            between = None if between is None else between[len(end) :]
            fields, end = replace(fields, between=fields.between[len(tail) :]), end[len(tail) :]
        trigger, begin = ("", begin) if has_channels else _trigger(begin, markers)
        return cls(
            markers=markers,
            trigger=trigger,
            begin=begin,
            middle=marked(given.middle),
            end=end,
            between=between,
            fields=fields,
            tail=tail,
            call_id=given.call_id,
            has_channels=has_channels,
        )


def _trigger(begin: str, markers: Markers) -> tuple[str, str]:
    """What a call begins with, and the rest."""
    begin = begin.lstrip()
    if begin[0] in markers.id_of:
        return begin[0], begin[1:]
    found = _MARKUP.match(begin)
    return (found.group(), begin[found.end() :]) if found else ("", begin)
