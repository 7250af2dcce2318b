"""The tokenizer of the served model, on this machine: what `client.tokenizer()` finds and checks.

A server says a name and no folder, so the caches that hold models by name are looked into:

    smollm2-135m    <Kakeya's cache>/models/smollm2-135m
    org/name        <the hub's cache>/models--org--name/snapshots/<commit of refs/main, or the only one>

A name is never read as a path: what a server says opens nothing outside the two.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from kakeya._errors import TokenizerError
from kakeya._values import ServerInfo

if TYPE_CHECKING:
    from kakeya.tokenization import ChatTokenizer

_PART = "[A-Za-z0-9_][A-Za-z0-9_.-]*"
_NAME = re.compile(f"{_PART}(?:/{_PART})?")
_COMMIT = re.compile("[0-9a-f]{40}")


def served_tokenizer(served: ServerInfo, path: str | os.PathLike[str] | None) -> ChatTokenizer:
    """path: a folder that has it; None looks for one. Raises TokenizerError."""
    from kakeya.tokenization import load_tokenizer

    if path is not None:
        tokenizer = load_tokenizer(path)
        require_served(tokenizer, served, path)
        return tokenizer
    folder = _folder_of(served.model_id)
    try:
        tokenizer = load_tokenizer(folder)
    except TokenizerError as error:
        if (folder / "tokenizer.json").is_file() or not any(folder.glob("*.gguf")):
            raise
        raise TokenizerError(
            f"{error}; kakeya models show {served.model_id} makes one of its GGUF file, and says the folder for "
            "client.tokenizer(PATH)"
        ) from error
    require_served(tokenizer, served, folder)
    return tokenizer


def require_served(tokenizer: ChatTokenizer, served: ServerInfo, path: str | os.PathLike[str]) -> None:
    """Raises TokenizerError if the tokenizer of the folder `path` is not the model's, by what the server says of it."""
    from kakeya.tokenization import own_ends

    tokens, ends, rows = int(getattr(tokenizer, "vocab_size", 0)), own_ends(tokenizer), served.vocab_size
    problem = ""
    if tokens > rows:
        problem = f"it has {tokens} tokens of text, and the model {rows} ids"
    elif ends and served.eos_token_ids and not {*ends} & {*served.eos_token_ids}:
        problem = f"texts end with {_listed(ends)} there, and with {_listed(served.eos_token_ids)} on the server"
    if problem:
        raise TokenizerError(
            f"the tokenizer in {os.fspath(path)} is not that of the server's model, {served.model_id}: {problem}; "
            "name another folder with client.tokenizer(PATH)"
        )


def _listed(ids: list[int] | tuple[int, ...]) -> str:
    return ", ".join(map(str, ids))


def _folder_of(name: str) -> Path:
    if _NAME.fullmatch(name) is None:
        raise TokenizerError(
            f"the server's model is {name!r}, which no cache of this machine has by name; name the folder that has its "
            "tokenizer with client.tokenizer(PATH)"
        )
    if "/" in name:
        entry = _hub_cache() / f"models--{name.replace('/', '--')}"
        folder = _snapshot(entry)
        sought = entry / "snapshots"
    else:
        folder = sought = _kakeya_cache() / "models" / name
    if folder is None or not os.path.isdir(folder):  # noqa: PTH112 - is_dir raises if a folder cannot be entered
        raise TokenizerError(
            f"the server's model is {name}, and its tokenizer is not in {sought}: fetch it (kakeya models fetch "
            f"{name}) or name the folder that has it with client.tokenizer(PATH)"
        )
    return folder


def _snapshot(entry: Path) -> Path | None:
    """The folder of the commit that `main` is, as far as it was fetched; without one, the only one there."""
    try:
        commit = (entry / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        commit = ""
    if _COMMIT.fullmatch(commit):
        return entry / "snapshots" / commit
    try:
        here = [each for each in (entry / "snapshots").iterdir() if _COMMIT.fullmatch(each.name)]
    except OSError:
        return None
    return here[0] if len(here) == 1 else None


def _kakeya_cache() -> Path:
    named = os.environ.get("KAKEYA_CACHE_DIR")
    return _in_full(named or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/kakeya")


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return _in_full(os.path.expandvars(named or f"{home}/hub"))


def _in_full(path: str) -> Path:
    return Path(os.path.expanduser(path))  # noqa: PTH111 - expanduser raises if there is no home folder
