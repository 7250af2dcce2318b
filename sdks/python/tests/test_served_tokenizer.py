"""`client.tokenizer()`, in the cases that TypeScript has, too: what it finds on this machine, checks and says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kakeya
from kakeya.v1 import runtime_pb2 as pb
from sdks.python.tests.conftest import Do, Scripted

FILE: Any = json.loads(
    (Path(__file__).parents[3] / "tests" / "conformance" / "served_tokenizers.json").read_text(encoding="utf-8")
)


def put(folder: Path, case: dict[str, Any]) -> None:
    """What lies on this machine."""
    for place in (*case.get("holds", ()), *case.get("bare", ())):
        (folder / at(place)).mkdir(parents=True)
    for place in case.get("holds", ()):
        for name, content in FILE["tokenizer"].items():
            (folder / at(place) / name).write_text(json.dumps(content), encoding="utf-8")
    if "gguf" in case:
        (folder / at(case["gguf"])).touch()
    if "main" in case:
        refs = folder / "hub" / "models--org--small" / "refs"
        refs.mkdir()
        (refs / "main").write_text(f"{at(case['main'])}\n", encoding="ascii")


def at(place: str) -> str:
    """With whole commits."""
    return place.replace("AAAA", "a" * 40).replace("BBBB", "b" * 40)


@pytest.mark.parametrize("case", FILE["cases"], ids=lambda case: case["name"])
async def test_the_served_models_tokenizer_is_found_or_the_error_says_how(
    case: dict[str, Any],
    scripted: Scripted,
    flavour: str,
    do: Do,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(tmp_path, case)
    monkeypatch.setenv("KAKEYA_CACHE_DIR", str(tmp_path / "kakeya"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    served = pb.GetServerInfoResponse(
        model_id=case["model"], vocab_size=case.get("vocab_size", 4), eos_token_ids=case.get("ends", [2, 3])
    )
    scripted.on("GetServerInfo", lambda *_: served)
    client: Any = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(scripted.target)
    given = [str(tmp_path / case["path"])] if "path" in case else []
    try:
        if "error" not in case:
            tokenizer = await do(client.tokenizer, *given)
            assert tokenizer.encode("cab<end>") == [2, 0, 1, 3]
            return
        with pytest.raises(kakeya.TokenizerError) as failed:
            await do(client.tokenizer, *given)
        assert [words for words in case["error"] if words not in str(failed.value)] == []
    finally:
        await do(client.close)


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HF_HOME", "HOME"])
async def test_caches_are_where_the_environment_says(
    variable: str, scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KAKEYA_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    below = {"XDG_CACHE_HOME": "huggingface/hub", "HF_HOME": "hub", "HOME": ".cache/huggingface/hub"}[variable]
    put(tmp_path, {"holds": [f"{below}/models--org--small/snapshots/AAAA"]})
    served = pb.GetServerInfoResponse(model_id="org/small", vocab_size=4)
    scripted.on("GetServerInfo", lambda *_: served)
    with kakeya.Client(scripted.target) as client:
        assert client.tokenizer().encode("ab") == [0, 1]
