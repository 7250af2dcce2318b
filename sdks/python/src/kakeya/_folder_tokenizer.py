"""The tokenizer that a model's folder describes: ids as tokenizer.json has them, text as its chat template writes it.

    tokenizer.json              vocabulary, merges, added tokens, how text is cut
    tokenizer_config.json       which tokens end, begin and fill a text; further added tokens; the template
    special_tokens_map.json     the same names; counts where the former has no added_tokens_decoder
    config.json                 the ids that end a text, where neither names a token

A template is a program of the model's author: it runs in jinja's sandbox, over plain values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, ext, nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import AddedToken, Tokenizer

from kakeya._chat_template import templates_in
from kakeya._tool_schema import tool_from

_FILE = "tokenizer.json"
# A message's reasoning, by the names that templates and clients have for it.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class FolderTokenizer:
    """A `ChatTokenizer`. Ids are never truncated or padded."""

    def __init__(
        self, backend: Tokenizer, named: Mapping[str, str], eos_ids: Sequence[int], chat_template: Any
    ) -> None:
        """named: texts of special tokens by their names, such as `bos_token`. eos_ids: where none is named."""
        self.backend_tokenizer = backend
        self.special_tokens_map = dict(named)
        self.chat_template: str | dict[str, str] | None = chat_template
        self._eos_ids = list(eos_ids)
        self._programs: dict[str, Any] = {}

    @classmethod
    def of(cls, folder: Path) -> FolderTokenizer:
        """Raises OSError, or ValueError for files that are damaged or contradict each other."""
        try:
            backend = Tokenizer.from_file(str(folder / _FILE))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{_FILE}: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = _object(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # an old one: then transformers has the names of the map
            config |= _object(folder / "special_tokens_map.json")
        _add_tokens(backend, config.get("added_tokens_decoder") or {})
        named = {name: text for name, value in _named(config) if (text := _text(value)) is not None}
        ends = _object(folder / "config.json").get("eos_token_id")
        eos_ids = [each for each in (ends if isinstance(ends, list) else [ends]) if type(each) is int]
        return cls(backend, named, eos_ids, templates_in(folder))

    @property
    def eos_token_id(self) -> int | list[int] | None:
        return self._id("eos_token") if "eos_token" in self.special_tokens_map else self._eos_ids or None

    @property
    def eot_token_id(self) -> int | None:
        """Of the end of a turn, where the files name it."""
        return self._id("eot_token")

    @property
    def eom_token_id(self) -> int | None:
        """Of the end of a message, where the files name it."""
        return self._id("eom_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._id("unk_token")

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        found: Mapping[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    @property
    def vocab_size(self) -> int:
        """Tokens of text; `len` counts the added ones with them."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=False))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    def encode(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> list[int]:
        """add_special_tokens: those that tokenizer.json puts around a text."""
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int] | int, *, skip_special_tokens: bool = False, **_: Any) -> str:
        """What the ids say, with no space taken out or put in."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Any] | None = None,
        **options: Any,
    ) -> Any:
        """The template's text, or with `tokenize` its ids.

        chat_template: another one, or the name of one of several. tools: as `kakeya.tools` takes them. options: what
        else the template reads. Raises ValueError if there is no template, and what the template raises.
        """
        source = self._source(chat_template, has_tools=tools is not None)
        program = self._programs.get(source) or self._programs.setdefault(source, _environment().from_string(source))
        text: str = program.render(
            **self.special_tokens_map,
            **_plain(options),
            messages=[_with_reasoning(_plain(dict(message))) for message in conversation],
            tools=None if tools is None else [_plain(_definition(tool)) for tool in tools],
            add_generation_prompt=add_generation_prompt,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _source(self, given: str | None, *, has_tools: bool) -> str:
        held = self.chat_template or {}
        templates = {"default": held} if isinstance(held, str) else held
        if given is not None:
            return templates.get(given, given)
        name = "tool_use" if has_tools and "tool_use" in templates else "default"
        if name not in templates:
            among = f"none of the chat templates {', '.join(templates)} is" if templates else "the folder holds no"
            raise ValueError(f"{among} {'the default' if templates else 'chat template'}; give one as chat_template")
        return templates[name]

    def _id(self, name: str) -> int | None:
        text = self.special_tokens_map.get(name)
        found: int | None = None if text is None else self.backend_tokenizer.token_to_id(text)
        return found


def _object(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing where there is none."""
    if not path.is_file():
        return {}
    held = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(held, dict):
        raise ValueError(f"{path.name} holds no object")
    return held


def _add_tokens(backend: Tokenizer, added: Any) -> None:
    """Those of tokenizer_config.json that tokenizer.json has not. Raises ValueError if one has another id there."""
    if not isinstance(added, dict) or not all(
        at.isdecimal() and isinstance(fields, dict) and isinstance(fields.get("content"), str)
        for at, fields in added.items()
    ):
        raise ValueError("tokenizer_config.json: added_tokens_decoder does not name tokens by their ids")
    held = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id, fields in sorted(added.items(), key=lambda item: int(item[0])):
        if fields["content"] not in held:
            flags = {name: fields[name] for name in ("single_word", "lstrip", "rstrip", "normalized") if name in fields}
            backend.add_tokens([AddedToken(fields["content"], special=bool(fields.get("special")), **flags)])
        if (found := backend.token_to_id(fields["content"])) != int(token_id):
            raise ValueError(
                f"tokenizer_config.json says that {fields['content']!r} is {token_id}, {_FILE} makes it {found}"
            )


def _named(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """`bos_token` and the like, those included that a model has beyond the usual ones."""
    usual = [(name, value) for name, value in config.items() if name.endswith("_token")]
    further = [config.get(name) for name in ("extra_special_tokens", "model_specific_special_tokens")]
    return [*usual, *(item for held in further if isinstance(held, dict) for item in held.items())]


def _text(value: Any) -> str | None:
    held = value.get("content") if isinstance(value, dict) else value
    return held if isinstance(held, str) else None


def _definition(tool: Any) -> Any:
    return tool_from(tool).schema if callable(tool) else tool


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Under each name that templates have for it."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Plain values: what methods others have are not the template's to call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(name): _plain(held) for name, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(held) for held in value]
    raise TypeError(f"a chat template takes plain values, got {type(value).__name__}")


def _environment() -> ImmutableSandboxedEnvironment:
    """jinja as chat templates are written for it."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _refuse, "strftime_now": _now, "namespace": _Namespace}
    return made


class _Generation(ext.Extension):
    """`{% generation %}`, with which templates mark the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Without attributes that begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a chat template may not set {name!r} on a namespace")
        super().__setitem__(name, value)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja's own escapes what HTML does not take.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
