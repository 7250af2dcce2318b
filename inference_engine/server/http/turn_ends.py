"""The ends of a turn that a model's files name, its chat template's with them: found by rendering a conversation."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from inference_engine.config import ModelConfig
from inference_engine.errors import ModelError, RequestError
from inference_engine.models import find_model, own_tokenizer
from inference_engine.models.folder import read_json
from inference_engine.models.gguf_header import GgufHeader, read_gguf
from inference_engine.models.gguf_vocabulary import chat_templates, vocabulary_of
from inference_engine.models.loader import FoundModel
from inference_engine.models.tokenizer_ids import SPECIAL_TOKENS, file_end_ids, text_of
from inference_engine.server.http.template import ChatTemplate
from kakeya._chat_template import NoDefaultTemplate, chosen_template, templates_in

logger = logging.getLogger(__name__)

# Texts that no template trims, escapes or reads as markup.
_QUESTION, _ANSWER = "The quick brown fox", "Kqzwxjvbm"


def find_end_ids(model: ModelConfig, vocab_size: int) -> tuple[int, ...]:
    """`model_end_ids` of the model in the settings. Raises ModelError for one that is not there."""
    found = find_model(model.model, cache=model.cache_path)
    return model_end_ids(found, own_tokenizer(found, model.model, model.cache_path), vocab_size)


def model_end_ids(found: FoundModel, tokenizer: Path | None, rows: int) -> tuple[int, ...]:
    """The ids that end a turn by everything that the model's files say, in ascending order; ids below `rows`.

    tokenizer: a folder that has it; None for a GGUF file's own, or none. What the files do not say, or say wrongly, is
    left out and logged: a server without text serves all the same.
    """
    found_ids = [*file_end_ids(found, tokenizer)]
    try:
        found_ids += _template_end_ids(found, tokenizer)
    except ModelError as error:
        logger.warning("what ends a turn is known without the chat template: %s", error)
    if beyond := [at for at in found_ids if at >= rows]:
        logger.warning("of the ids that end a turn by the model's files %s are no ids of its %d tokens", beyond, rows)
    return tuple(sorted({at for at in found_ids if at < rows}))


def end_of_turn(template: ChatTemplate, added: Mapping[str, int], *, in_parts: bool = False) -> int | None:
    """The token that the template writes after the assistant's answer; None for a turn that ends in plain text.

    added: ids by text. in_parts: of messages whose content is a list of parts. Raises ModelError if the template does
    not show a plain conversation.
    """
    messages: list[dict[str, Any]] = [
        {"role": role, "content": [{"type": "text", "text": words}] if in_parts else words}
        for role, words in (("user", _QUESTION), ("assistant", _ANSWER))
    ]
    try:
        text = template.render(messages, add_generation_prompt=False)
    except RequestError as error:
        raise ModelError(f"the model's chat template cannot render a plain conversation: {error.message}") from None
    before, said, after = text.rpartition(_ANSWER)
    if not said:
        raise ModelError("the model's chat template drops the assistant's messages")
    if _QUESTION not in before:
        raise ModelError("the model's chat template drops the user's messages")
    # As tokenizers look for them: the longest.
    return added.get(max((each for each in added if each and after.startswith(each)), key=len, default=""))


def template_of(templates: str | Mapping[str, str] | None, name: str) -> str | None:
    """The one for plain conversations, None without any. Raises ModelError, with their names, if it is none of them."""
    try:
        return chosen_template(templates)
    except NoDefaultTemplate as error:
        raise ModelError(
            f"{name}: {error}; name it in tokenizer_config.json (chat_template: name: default), or put it into "
            "chat_template.jinja; for a GGUF file, in a folder of its own with tokenizer.json"
        ) from None


def _template_end_ids(found: FoundModel, tokenizer: Path | None) -> list[int]:
    if tokenizer is None and not found.only_gguf:
        return []
    templates, variables, added = _text_side(tokenizer) if tokenizer else _text_side_of_gguf(read_gguf(found.stored))
    source = template_of(templates, found.model_id)
    if source is None:
        return []
    with closing(ChatTemplate(source, variables)) as template:
        try:
            end = end_of_turn(template, added)
        except ModelError:
            end = end_of_turn(template, added, in_parts=True)
    return [] if end is None else [end]


def _text_side(folder: Path) -> tuple[str | Mapping[str, str] | None, dict[str, str], dict[str, int]]:
    """Chat templates, the variables that they see, and ids by the texts that are found as a whole."""
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    added = {}
    if (folder / "tokenizer.json").is_file():
        specification = read_json(folder / "tokenizer.json")
        added = {token["content"]: int(token["id"]) for token in specification.get("added_tokens") or ()}
    named = {name: text for name in SPECIAL_TOKENS if (text := text_of(config.get(name))) is not None}
    try:
        return templates_in(folder), named, added
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: its chat template cannot be read: {error}") from error


def _text_side_of_gguf(header: GgufHeader) -> tuple[str | Mapping[str, str] | None, dict[str, str], dict[str, int]]:
    vocabulary = vocabulary_of(header)
    named = {name: vocabulary.texts[at] for name, at in vocabulary.named.items()}
    return chat_templates(header), named, {text: at for at, text in vocabulary.wholes().items()}
