"""Which chat template of a model is used, and where its files have it.

    tokenizer_config.json           chat_template: a text, or a list of {name, template}
    chat_template.json              the same key, where the former has none; processors of pictures write it
    chat_template.jinja             a text, in place of the former
    additional_chat_templates/      NAME.jinja, beside it

A list can be without a `default`. Then a template that is alone is used, and of several the one that is for no special
purpose; where there is none, the user has to choose.

This file imports nothing of ours, as `_special_text.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DEFAULT = "default"
# By these names templates expect documents or tools, which a plain conversation has not.
_SPECIAL_PURPOSES = ("rag", "tool_use")


class NoDefaultTemplate(ValueError):
    """There are several chat templates, and no name says which is for a plain conversation."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(f"the chat templates are named {', '.join(names)}, and none is the default")
        self.names = names


def chosen_template(templates: str | Mapping[str, str] | None) -> str | None:
    """The template for a plain conversation; None if there is none at all. Raises NoDefaultTemplate."""
    if templates is None or isinstance(templates, str):
        return templates or None
    if not templates:
        return None
    plain = [name for name in templates if name not in _SPECIAL_PURPOSES]
    for names in (([_DEFAULT] if _DEFAULT in templates else []), list(templates), plain):
        if len(names) == 1:
            return templates[names[0]]
    raise NoDefaultTemplate(tuple(sorted(templates)))


def templates_in(folder: Path) -> str | dict[str, str] | None:
    """The chat templates of a folder, by name if they have some. Raises OSError or ValueError for damaged files."""
    found: dict[str, str] = {}
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            held = json.loads((folder / name).read_text(encoding="utf-8"))
            if not isinstance(held, dict):
                raise ValueError(f"{name} holds no object")
            found = _named(held.get("chat_template"), name) or found
    if (folder / "chat_template.jinja").is_file():
        found[_DEFAULT] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    return found[_DEFAULT] if list(found) == [_DEFAULT] else found or None


def _named(templates: Any, file: str) -> dict[str, str]:
    held = {_DEFAULT: templates} if isinstance(templates, str) else {} if templates is None else templates
    if isinstance(held, list) and all(isinstance(item, dict) for item in held):
        held = {item.get("name"): item.get("template") for item in held}
    if not isinstance(held, dict) or not all(isinstance(text, str) for item in held.items() for text in item):
        raise ValueError(f"{file}: chat_template is neither a text nor a list of {{name, template}}, which are texts")
    return held
