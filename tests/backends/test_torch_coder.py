"""Entries restored by a device's own operations are those of plain torch, for models that rotate as these do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from inference_engine.backends.op_list_executor import OpListExecutor
from inference_engine.backends.torch_coder import TorchCoder
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.kernels.latents import PLAIN
from inference_engine.kernels.ops import REFERENCE, DeviceOps
from inference_engine.kv.context import ArchivedCodes, KVContext, NoCoder, RestoredLayer
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.strategies import parse_strategy
from inference_engine.models.seam import ATTENTION, Seam
from inference_engine.types import GenerateParams, ModelFacts, TokenCommitted
from kv_cache_proposer.f_theta.codec import LatentCodec
from laboratory.training.latent import calibrate
from tests.further import further

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 512,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
IDS = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(1))
OPS = replace(REFERENCE, attends_together=True)


class WithoutOperations(TorchForward):
    def open(self, geometry: Geometry, capacity_bytes: int, **others: Any) -> KVContext:
        return replace(super().open(geometry, capacity_bytes, **others), coder=NoCoder())


def made_forward(
    kind: type[TorchForward], config: PretrainedConfig, device: str = "cpu", ops: DeviceOps = OPS
) -> tuple[TorchForward, LatentCodec]:
    """A model of random weights, and a codec for it. On a GPU its steps are a list, and are recorded."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    # Sharper attention: entries matter.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(3)
    codec = calibrate(model, [IDS], layers=range(3), bytes_per_token=96, group_layers=2)
    model.set_attn_implementation(ATTENTION)
    seam = Seam(model.to(torch.device(device)))
    facts = ModelFacts(
        model_id="tiny", vocab_size=64, trained_positions=512, device=device, dtype="float32", numerics="torch",
    )  # fmt: skip
    is_gpu = device != "cpu"
    listed = OpListExecutor(seam, ops.open_fused()) if is_gpu else None
    forward = kind(seam, facts, torch.device(device), ops=ops, records_graphs=is_gpu, listed=listed)
    return forward, codec.to(torch.device(device))


@pytest.mark.parametrize("rope", [None, YARN], ids=["default", "yarn"])
def test_entries_are_those_that_the_codec_decodes_and_the_model_rotates(rope: dict[str, Any] | None) -> None:
    forward, codec = made_forward(TorchForward, LlamaConfig(**SIZES, rope_parameters=rope))
    coder = TorchCoder(forward.seam, PLAIN, torch.device("cpu"))
    keys, values = (torch.randn(3, 40, 2, 32, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    codes = codec.encode(list(keys), list(values))
    half = -(-codes.shape[1] // 2)
    halves = (codes[:, :half].contiguous(), torch.nn.functional.pad(codes[:, half:], (0, 2 * half - codes.shape[1])))
    first, begin, end = 5, 12, 33
    places = torch.full((3, 2, 2, end - begin, 32), torch.nan)
    layers = []
    for layer, (own_keys, own_values) in enumerate(places):
        decoder = codec.decoder(layer)
        assert decoder is not None
        archived = ArchivedCodes(halves=halves, first=first, decoder=decoder)
        assert coder.restores(archived, "default")
        layers.append(RestoredLayer(codes=archived, rotary="default", keys=own_keys, values=own_values))

    found = torch.zeros(3, 2)
    coder.restore(layers, begin, found)

    assert found.isfinite().all()
    decoded = codec.decode(codes[begin - first : end - first])
    shifts = torch.arange(begin, end)
    for layer, (own_keys, own_values) in enumerate(places):
        expected = forward.seam.rotate(decoded[0][layer].transpose(0, 1), shifts, "default")
        torch.testing.assert_close(own_keys, expected, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(own_values, decoded[1][layer].transpose(0, 1), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("mode", [further("hold"), "stream"])
def test_a_session_restored_by_operations_says_what_one_by_plain_torch_says(mode: str) -> None:
    said: list[list[TokenCommitted]] = []
    for kind in (TorchForward, WithoutOperations):
        forward, codec = made_forward(kind, LlamaConfig(**SIZES))
        settings = EngineConfig(kv_bytes=2**24, segment_tokens=16, page_tokens=4)
        with Engine(forward, settings, latent=codec) as engine:
            strategy = parse_strategy(f"restored:sink=2,window=16,source=latent,bytes_per_token=96,mode={mode}")
            session = engine.create_session(strategy=strategy, limit_tokens=400).session_id
            said.append([])
            for turn in range(3):
                engine.append(session, IDS.flatten()[turn * 60 : turn * 60 + 60].tolist())
                events = engine.generate(session, GenerateParams(max_tokens=12, logprobs=True))
                said[-1] += [event for event in events if isinstance(event, TokenCommitted)]
    ours, theirs = said
    assert [event.token_id for event in ours] == [event.token_id for event in theirs]
    torch.testing.assert_close(_logprobs(ours), _logprobs(theirs), atol=2e-3, rtol=0)


def _logprobs(events: list[TokenCommitted]) -> Tensor:
    return torch.tensor([event.logprob for event in events])
