"""The shim of a `kakeya serve` process, with a tiny model and with the small real one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from inference_engine.config import ModelConfig, resolve
from inference_engine.models import tokenizer_folder
from kakeya import Client, tokenization
from tests.processes import LIMIT_SECONDS, Server, kakeya, kakeya_serve
from tests.tiny_folder import save_tiny_chat_model, save_tiny_model

MODEL = "smollm2-135m"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
TOKENS = 16


def base_url(server: Server) -> str:
    return server.ready_line.split("chat completions at ")[1].split(",")[0].strip()


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url(server), api_key="none", max_retries=0, timeout=LIMIT_SECONDS)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def real_server() -> Iterator[Server]:
    with kakeya_serve("--model", MODEL, "--kv-bytes=1GiB", "--http-bind=127.0.0.1:0") as server:
        yield server


def test_a_server_says_where_the_shim_is_and_both_end_with_one_signal(tiny_folder: Path) -> None:
    ports = ("--http-bind=127.0.0.1:0", "--metrics-bind=127.0.0.1:0")
    with kakeya_serve("--model", tiny_folder, "--kv-bytes=64MiB", *ports) as server:
        with client_of(server) as client:
            stream = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=8, stream=True
            )
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("length", "stop")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_model_that_cannot_chat_is_refused_before_it_is_served(tmp_path: Path, tiny_folder: Path) -> None:
    mute = save_tiny_model(tmp_path / "mute")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (mute / name).write_bytes((tiny_folder / name).read_bytes())
    done = kakeya("serve", "--model", mute, "--kv-bytes=64MiB", "--bind=127.0.0.1:0", "--http-bind=127.0.0.1:0")
    assert done.returncode == 1
    assert "mute has no chat template" in done.stderr
    assert "http_bind" in done.stderr


@pytest.mark.real_model
def test_the_real_model_answers_streamed_or_not_what_it_answers_in_a_session(real_server: Server) -> None:
    tokenizer: Any = tokenization.load_tokenizer(tokenizer_folder(MODEL, resolve(ModelConfig).cache_path))
    with (
        Client(real_server.target) as sdk,
        sdk.create_session(eos_token_ids=tokenization.end_of_turn_ids(tokenizer)) as session,
    ):
        session.append(tokenization.tokens_for_chat(QUESTION, tokenizer))
        expected = tokenizer.decode(session.generate(TOKENS).result().token_ids, skip_special_tokens=True)
    assert "Paris" in expected
    with client_of(real_server) as client:
        asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": TOKENS}
        assert client.models.list().data[0].id == MODEL
        assert client.chat.completions.create(**asked).choices[0].message.content == expected
        stream = client.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected


@pytest.mark.real_model
def test_the_real_model_writes_characters_of_several_tokens_whole(real_server: Server) -> None:
    prompt: Any = [{"role": "user", "content": "Repeat exactly: 😀😀😀 你好"}]
    with client_of(real_server) as client:
        stream = client.chat.completions.create(model=MODEL, messages=prompt, max_tokens=48, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "😀" in "".join(pieces)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
