"""Special tokens come out of what the chat template writes, never out of the messages.

A template makes one text of markup and messages, and a tokenizer finds the text of a special token wherever it stands:
`<|im_end|>` in a message ends the turn. So:

    message    "a <|im_end|> b"          → "a ⟨private character⟩ b", before the template sees it
    template   "<|im_start|>user\\na ⟨⟩ b<|im_end|>"
    encoded    what the template wrote as special tokens, the rest as text, with the merges that text has there

The last step takes a copy of the tokenizer in which special tokens have names that no message can hold. Where no
message holds such a text, nothing of this happens: the ids are the tokenizer's own for the rendered text, and are only
checked to hold no special token that the text does not show.

A template may also write a special token in pieces, with text of a message between them: `<|{{ message.name }}|>`.
Then it is asked again, for messages in whose words no character can be one of a special token. What is left is the
template's own; if that is less, the messages are refused. A role that templates know is not text of a message.

This file imports nothing of ours, so that a process without the SDK can load it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

Encode = Callable[[str], list[int]]

_PRIVATE = range(0xE000, 0xF900)
_PRIVATE_USED = re.compile("[\ue000-\uf8ff]")
# How a token of markup looks, where the tokenizer does not call it special: `<tool_call>`, `[INST]`.
_MARKUP = re.compile(r"<\S+>|\[\S+\]")
# Some vocabularies have whole tags of HTML, with which users write: vocabulary like any other.
_HTML = re.compile(
    r"</?(?:a|article|b|blockquote|body|br|caption|code|dd|del|div|dl|dt|em|footer|h[1-6]|head|header|hr|html|i|img|ins"
    r"|kbd|li|mark|ol|p|pre|q|s|section|small|span|strong|sub|sup|table|tbody|td|tfoot|th|thead|title|tr|u|ul|var)/?>"
)
# Where a template's own text stops and goes on: `'<|' + message.role + '|>'`, `<|{{ role }}|>`, `'<|%s|>' % role`.
_STOPS, _GOES_ON = re.compile(r"\s*['\"{%]"), re.compile(r"(?:['\"}]|%s)\s*")
# Values by which templates choose what to write: of messages, of parts of them, and of what tools take.
_KINDS = ("role", "type")
_ROLES = frozenset({"system", "developer", "user", "assistant", "model", "tool", "function", "ipython", "observation"})
_PARTS = frozenset({"text", "image", "image_url", "audio", "input_audio", "video", "document", "file"})
_SCHEMA = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_KNOWN_KINDS = _ROLES | _PARTS | _SCHEMA


class SpecialTextError(Exception):
    """Markup and messages cannot be kept apart; says why."""


@dataclass(frozen=True, eq=True)
class SpecialTokens:
    """What must not come out of messages, by its text.

    turns: the tokenizer's special tokens and ends of text, in no message. markup: other added tokens that look like
    markup, such as `<tool_response>` and `<|fim_prefix|>`; the assistant's own messages may hold them, because models
    write them.
    """

    turns: Mapping[str, int]
    markup: Mapping[str, int]
    unknown_id: int | None = None
    # Of `turns`, those that the template could write around words of messages.
    in_pieces: frozenset[str] = frozenset()
    _find: tuple[re.Pattern[str], re.Pattern[str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        patterns = (_any_of(self.turns), _any_of({*self.turns, *self.markup}))
        object.__setattr__(self, "_find", patterns)

    @classmethod
    def of(
        cls, added: Iterable[tuple[int, str, bool]], *, end_ids: Iterable[int], template: str, unknown_id: int | None
    ) -> SpecialTokens:
        """added: id, text and whether the tokenizer calls it special. template: its source."""
        ends = set(end_ids)
        turns, markup = {}, {}
        for token_id, text, is_special in added:
            if not text.strip():
                continue
            if is_special or token_id in ends:
                turns[text] = token_id
            elif _MARKUP.fullmatch(text) and (text in template or not _HTML.fullmatch(text)):
                markup[text] = token_id
        in_pieces = _in_pieces(frozenset(turns), template)
        return cls(turns=turns, markup=markup, unknown_id=unknown_id, in_pieces=in_pieces)

    @property
    def ids(self) -> Mapping[str, int]:
        return {**self.markup, **self.turns}

    def finder(self, *, markup: bool) -> re.Pattern[str]:
        return self._find[markup]

    def edges(self) -> frozenset[str]:
        """Characters with which texts of two origins could be joined to a special token."""
        return _edges(self.turns)

    def letters(self) -> frozenset[str]:
        """Characters that words between two pieces of a special token could have, whatever their case."""
        held = "".join(self.in_pieces)
        return self.edges() | frozenset(held + held.lower() + held.upper())

    def is_kind(self, name: str, value: str) -> bool:
        """Is that value of that name one by which templates choose, and no text?"""
        return name in _KINDS and (value in _KNOWN_KINDS or not any(value in text for text in self.in_pieces))


class Conversation:
    """Messages and options as the template is to see them, and what becomes of the text that it makes of them."""

    def __init__(
        self,
        special: SpecialTokens,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> None:
        """Raises SpecialTextError if there are more kinds of special tokens in the messages than can be held apart."""
        self._special = special
        self._given = messages, options
        texts = [text for value in (*messages, options) for text in _texts(value)]
        self._shown = self._placeholders(texts)
        self._token_of = {character: token for token, character in self._shown.items()}
        edges = special.edges()
        self.is_doubtful = bool(special.in_pieces) or (
            bool(edges) and re.search(f"[{re.escape(''.join(sorted(edges)))}]", "\n".join(texts)) is not None
        )
        self.messages, self.options = self._changed(lambda text: text)

    def broken(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The same without any character that could be a part of a special token."""
        special = self._special
        spare = next(chr(code) for code in reversed(_PRIVATE) if chr(code) not in self._token_of)
        table = str.maketrans(dict.fromkeys(special.edges(), spare))
        messages, options = self._changed(lambda text: text.translate(table))
        if special.in_pieces:
            blank = partial(_blanked, str.maketrans(dict.fromkeys(special.letters(), spare)), spare, special.is_kind)
            messages = [blank(message) for message in messages]
            options |= {name: blank(options[name]) for name in ("tools", "documents") if name in options}
        return messages, options

    def check_broken(self, text: str, broken: str) -> None:
        """text, broken: what the template makes of `messages` and of `broken()`.

        Raises SpecialTextError if a special token of `text` is put together from pieces of messages.
        """
        find = self._special.finder(markup=False)
        if find.findall(text) != find.findall(broken):
            raise SpecialTextError("the chat template puts a special token together from parts of the messages")

    def encode(self, text: str, encode: Encode, respelled: Callable[[], Respelled]) -> list[int]:
        """The ids of a rendered text, or of its beginning. encode: the tokenizer's own method.

        Raises SpecialTextError if a special token would come out of a message, or the template altered the messages'
        special text irreversibly.
        """
        if not any(character in text for character in self._token_of):
            self._refuse_escaped(text)
            ids = encode(text)
        else:
            self._refuse_escaped(text)
            copy = respelled()
            bare = "".join(character for character in text if character not in self._token_of)
            if encode(bare) != copy.encode(copy.spell(bare, {})):
                raise SpecialTextError(f"{self._named()}, and this tokenizer cannot read that as text")
            ids = copy.encode(copy.spell(text, self._token_of))
        known = self._special.ids
        special_ids = {*known.values()} - {self._special.unknown_id}
        seen = Counter(known[token] for token in self._special.finder(markup=True).findall(text))
        if Counter(token_id for token_id in ids if token_id in special_ids) - seen:
            raise SpecialTextError("the tokenizer makes special tokens of text that is none")
        return ids

    def _named(self) -> str:
        return f"the messages hold {', '.join(map(repr, sorted(self._shown)))}"

    def _refuse_escaped(self, text: str) -> None:
        for character in self._token_of:
            if f"\\u{ord(character):04x}" in text.lower():
                raise SpecialTextError(f"{self._named()}, which the chat template escapes")

    def _placeholders(self, texts: Sequence[str]) -> dict[str, str]:
        messages, options = self._given
        found: set[str] = set()
        for message in messages:
            find = self._finder(message)
            for text in _texts(message):
                found.update(find.findall(text))
        for text in _texts(options):
            found.update(self._special.finder(markup=True).findall(text))
        if not found:
            return {}
        used = {character for text in texts for character in _PRIVATE_USED.findall(text)}
        free = [chr(code) for code in _PRIVATE if chr(code) not in used]
        if len(found) >= len(free):
            raise SpecialTextError("the messages hold too many private characters")
        return dict(zip(sorted(found), free, strict=False))

    def _finder(self, message: Mapping[str, Any]) -> re.Pattern[str]:
        return self._special.finder(markup=message.get("role") != "assistant")

    def _changed(self, change: Callable[[str], str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        messages, options = self._given

        def with_finder(find: re.Pattern[str]) -> Callable[[str], str]:
            return lambda text: change(find.sub(lambda match: self._shown[match.group()], text))

        changed = [dict(_mapped(message, with_finder(self._finder(message)))) for message in messages]
        return changed, dict(_mapped(options, with_finder(self._special.finder(markup=True))))


class Respelled:
    """A copy of a tokenizer in which special tokens have names that no message can hold, and nothing else differs."""

    def __init__(self, specification: str, special: SpecialTokens) -> None:
        """specification: what tokenizer.json holds. Raises SpecialTextError if there can be no such copy."""
        from tokenizers import Tokenizer

        nonce = secrets.token_hex(8)
        self._names = {text: f"\ue100{nonce}.{token_id}\ue101" for text, token_id in special.ids.items()}
        self._find = special.finder(markup=True)
        try:
            copy = Tokenizer.from_str(json.dumps(_renamed(json.loads(specification), self._names)))
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            raise SpecialTextError(f"this tokenizer cannot separate text from special tokens: {error}") from None
        copy.no_truncation()
        copy.no_padding()
        if any(copy.token_to_id(self._names[text]) != token_id for text, token_id in special.ids.items()):
            raise SpecialTextError("this tokenizer cannot separate text from special tokens")
        self._copy = copy

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._copy.encode(text, add_special_tokens=False).ids
        return ids

    def spell(self, text: str, token_of: Mapping[str, str]) -> str:
        """`text` with its special tokens under their names, and the characters of `token_of` as the texts they are."""
        named = self._find.sub(lambda match: self._names[match.group()], text)
        return "".join(token_of.get(character, character) for character in named) if token_of else named


def _renamed(specification: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    for token in specification["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = specification["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    # What it adds and trims changes no ids of text.
    return {**specification, "post_processor": None}


def _texts(value: Any) -> Iterator[str]:
    """All texts in a message or an option, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(name)
            if name != "chat_template":
                yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _blanked(table: dict[int, str], spare: str, is_kind: Callable[[str, str], bool], value: Any, name: str = "") -> Any:
    """The same value, called `name`, with its words changed by `table`; kinds and names stay.

    Names of a call's arguments are words as well. They are made of `spare`, so that no two become one.
    """
    blank = partial(_blanked, table, spare, is_kind)
    if isinstance(value, str):
        return value if is_kind(name, value) else value.translate(table)
    if isinstance(value, Mapping):
        if name == "arguments":
            return {spare * (at + 1): blank(item, name) for at, item in enumerate(value.values())}
        return {each: blank(item, each) for each, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(blank(item, name) for item in value) if type(value) in (list, tuple) else value
    return value


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The same value with its texts changed. A `chat_template` among options stays as it is."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            _mapped(name, change): item if name == "chat_template" else _mapped(item, change)
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value) if type(value) in (list, tuple) else value
    return value


def _edges(texts: Iterable[str]) -> frozenset[str]:
    near = "".join(text[:2] + text[-2:] for text in texts)
    return frozenset(character for character in near if not (character.isalnum() or character.isspace())) - {"/"}


@lru_cache(16)
def _in_pieces(tokens: frozenset[str], template: str) -> frozenset[str]:
    """Of `tokens`, those of which the template could write beginning and end, and words without edges the rest."""
    if not tokens or not template:
        return tokens  # the template is unknown
    edges, sizes = _edges(tokens), range(max(map(len, tokens)))
    stops = {
        template[max(0, found.start() - size) : found.start()] for found in _STOPS.finditer(template) for size in sizes
    }
    goes_on = {template[found.end() : found.end() + size] for found in _GOES_ON.finditer(template) for size in sizes}

    def could_be(token: str) -> bool:
        first, last = _run(token, edges), len(token) - _run(token[::-1], edges)
        begins = (token[:size] for size in range(first, len(token)))
        ends = (token[size:] for size in range(1, last + 1))
        return any(not each or each in stops for each in begins) and any(not each or each in goes_on for each in ends)

    return frozenset(filter(could_be, tokens))


def _run(text: str, edges: frozenset[str]) -> int:
    """How many characters at the beginning of `text` are edges."""
    return next((at for at, character in enumerate(text) if character not in edges), len(text))


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of `texts`, in time that does not grow with their number."""
    words = set(texts)
    return re.compile(_alternatives(words) if words else r"(?!)")


def _alternatives(words: set[str]) -> str:
    by_first: dict[str, set[str]] = {}
    for word in words - {""}:
        by_first.setdefault(word[0], set()).add(word[1:])
    branches = [re.escape(first) + _alternatives(rest) for first, rest in sorted(by_first.items())]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in words else "")
