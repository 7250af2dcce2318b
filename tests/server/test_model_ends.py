"""The ends of a turn: a union of what a model's files say, which the server names, and a session's if it asks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from inference_engine.config import ModelConfig
from inference_engine.server.http.turn_ends import find_end_ids
from kakeya import Client
from kakeya.v1 import runtime_pb2 as pb
from tests.further import further_test
from tests.models.tiny_gguf import tiny_model, write_gguf
from tests.processes import kakeya_serve
from tests.server.wire import HISTORY, connected, serving
from tests.tiny import VOCABULARY
from tests.tiny_folder import END, save_tiny_chat_model, tiny_tokenizer
from tests.tiny_native import served_engine

FORCED = {101: 1000.0}  # a logit bias: id 101 is generated
START_ID, END_ID = (tiny_tokenizer().convert_tokens_to_ids(text) for text in ("<|im_start|>", END))
OTHER_END = "{% for message in messages %}{{ message['content'] }}<|im_start|>{% endfor %}"


def answer(given: pb.CreateSessionResponse) -> list[int] | None:
    return list(given.eos_token_ids.token_ids) if given.HasField("eos_token_ids") else None


async def test_a_session_has_the_models_ends_if_it_asks_for_them_and_only_then() -> None:
    with served_engine(end_ids=[101, 7]) as engine:
        async with serving(engine) as server, connected(server) as client:
            info = await client.call("GetServerInfo", pb.GetServerInfoRequest())
            assert list(info.eos_token_ids) == [7, 101]
            for asked, ends in (
                ({}, []),  # as the frozen contract has it
                ({"model_eos_token_ids": False}, []),
                ({"model_eos_token_ids": True}, [7, 101]),
                ({"eos_token_ids": [9]}, [9]),
                ({"eos_token_ids": [9], "model_eos_token_ids": True}, [7, 9, 101]),
            ):
                opened = await client.call("CreateSession", pb.CreateSessionRequest(**asked))
                assert answer(opened) == ends
                await client.append(opened.session_id, HISTORY)
                generated = await client.generate(opened.session_id, 3, logit_bias=FORCED)
                assert generated == [101] * (1 if 101 in ends else 3)
                assert list((await client.info(opened.session_id)).eos_token_ids) == ends


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "template", "ends"),
    [
        ({}, None, {}, None, {END_ID}),  # the tokenizer's, and the template's is the same
        ({"eos_token_id": 3}, None, {}, None, {3, END_ID}),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": [5, 4]}, {}, None, {3, 4, 5, END_ID}),
        ({}, {"eos_token_id": 6}, {"eos_token": None}, None, {6, END_ID}),
        ({}, None, {"eos_token": {"content": "a"}}, OTHER_END, {START_ID, "a"}),
        ({}, None, {"eot_token": "b", "eom_token": "c"}, "", {END_ID, "b", "c"}),
        ({"eos_token_id": 3}, None, {}, "{{ raise_exception('no') }}", {3, END_ID}),
        ({"eos_token_id": [3, VOCABULARY]}, None, {}, "", {3, END_ID}),  # no id of the model, which the log says
        ({"text_config": {"eos_token_id": 8}}, None, {}, "", {8, END_ID}),
    ],
)
def test_the_ends_of_a_folder_are_a_union_of_what_its_files_say(
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    tokenizer: Mapping[str, Any],
    template: str | None,
    ends: set[int | str],
    tmp_path: Path,
) -> None:
    folder = save_tiny_chat_model(tmp_path / "tiny")
    for name, changes in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        held = json.loads((folder / name).read_text())
        if name == "config.json":
            held.pop("eos_token_id", None)
        (folder / name).write_text(json.dumps(held | dict(changes)))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    ids = {tiny_tokenizer().convert_tokens_to_ids(end) if isinstance(end, str) else end for end in ends}
    settings = ModelConfig(model=str(folder), cache_dir=str(tmp_path / "cache"))
    assert find_end_ids(settings, VOCABULARY) == tuple(sorted(ids))


def test_a_model_without_a_tokenizer_has_the_ends_of_its_configuration(tmp_path: Path) -> None:
    folder = save_tiny_chat_model(tmp_path / "tiny")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).unlink(missing_ok=True)
    held = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(held | {"eos_token_id": [9, 8]}))
    assert find_end_ids(ModelConfig(model=str(folder), cache_dir=str(tmp_path / "cache")), VOCABULARY) == (8, 9)


@further_test
def test_a_server_names_the_ends_of_its_file_and_its_sessions_have_them(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(tiny_model("llama"), path, ids={"eot": 5, "eom": 6, "padding": 2**32 - 1})
    with (
        kakeya_serve("--model", path, f"--cache-dir={tmp_path / 'cache'}", "--kv-bytes=8MiB") as server,
        Client(server.target) as client,
        client.create_session() as session,
    ):
        assert client.server_info().eos_token_ids == (1, 5, 6)
        session.append([40, 41, 42])
        assert session.generate(4, logit_bias={5: 1000.0}).result().token_ids == (5,)
