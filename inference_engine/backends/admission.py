"""Admits a model by test: a shrunken twin of it must give the model's own logits through our seam.

The twin has the same class and a few small layers; every window and context field is cut to 8, so that windows bite
within 40 tokens. Its own eager forward over the whole text is compared with ours in chunks, and packed beside a
stranger. An architecture that attends in a way we do not honour differs here, before it could answer wrongly.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from inference_engine.backends.base import Step
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.errors import ModelError
from inference_engine.kv.context import KVContext
from inference_engine.kv.plan import StepPlan
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies.full import Full
from inference_engine.models.seam import ATTENTION, Seam
from inference_engine.types import Mode, ModelFacts

_LENGTH = 40
_CHUNK = 16
_WINDOW_FIELDS = ("sliding_window", "attention_chunk_size", "local_attention_window")
_SMALL: dict[str, int] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
# Different summation orders in float32, over logits of order 1.
_TOLERANCE = 2e-4


def admit(model: PreTrainedModel) -> None:
    """Raise ModelError unless a twin of `model` is served rightly. Leaves `model` and the random state alone."""
    kind = type(model)
    try:
        config = shrunken(model.config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            expected, ours = _both_ways(kind, config)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{kind.__name__} could not be tried out on a small twin: {type(error).__name__}: {error}"
        ) from error
    difference = float((expected - ours).abs().max())
    if not difference <= _TOLERANCE * max(1.0, float(expected.abs().max())):
        raise ModelError(
            f"{kind.__name__} is not served rightly: through the attention seam a small twin's logits differ by "
            f"{difference:.3g} from the model's own. Its attention does something the runtime does not honour"
        )


def shrunken(config: PretrainedConfig) -> PretrainedConfig:
    """A config of the same kind with up to four small layers, both kinds of layer among them, and windows of 8."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    types: list[str] | None = getattr(text, "layer_types", None)
    chosen = _representative_layers(types, text.num_hidden_layers)
    group = max(1, text.num_attention_heads // (getattr(text, "num_key_value_heads", None) or text.num_attention_heads))
    changes: dict[str, Any] = {name: value for name, value in _SMALL.items() if getattr(text, name, None)}
    changes |= {name: 8 for name in _WINDOW_FIELDS if getattr(text, name, None)}
    changes |= {
        "num_hidden_layers": len(chosen),
        "num_attention_heads": 2 * group,
        "max_position_embeddings": 4 * _LENGTH,
    }
    if getattr(text, "num_key_value_heads", None):
        changes["num_key_value_heads"] = 2
    if getattr(text, "head_dim", None):
        changes["head_dim"] = 16
    else:
        changes["hidden_size"] = 2 * group * 16
    if types is not None:
        changes["layer_types"] = [types[index] for index in chosen]
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        changes[name] = None
    for name, value in changes.items():
        setattr(text, name, value)
    small.dtype = text.dtype = torch.float32
    return small


def _representative_layers(types: list[str] | None, count: int) -> list[int]:
    if types is None:
        return list(range(min(2, count)))
    firsts = [types.index(kind) for kind in dict.fromkeys(types)]
    return sorted({*firsts, *range(min(2, count))})


def _both_ways(kind: type[PreTrainedModel], config: PretrainedConfig) -> tuple[Tensor, Tensor]:
    config._attn_implementation = "eager"
    own = kind(config).eval()
    vocabulary = config.get_text_config().vocab_size
    text = torch.randint(0, vocabulary, (_LENGTH,))
    with torch.inference_mode():
        expected = own(input_ids=text[None], use_cache=False).logits[0].float()
    taken_config = copy.deepcopy(config)
    taken_config._attn_implementation = ATTENTION
    taken = kind(taken_config).eval()
    taken.load_state_dict(own.state_dict())
    seam = Seam(taken)
    facts = ModelFacts(
        model_id="twin",
        vocab_size=vocabulary,
        trained_positions=seam.trained_positions,
        device="cpu",
        dtype="float32",
    )
    forward = TorchForward(seam, facts, torch.device("cpu"))
    geometry = forward.geometry(mode=Mode.BATCHED, page_tokens=4, segment_tokens=_CHUNK)
    context = forward.open(geometry, 2 * (_LENGTH + geometry.page_tokens) * geometry.row_bytes)
    return expected, _in_chunks_beside_a_stranger(forward, context, text.numpy())


def _in_chunks_beside_a_stranger(forward: TorchForward, context: KVContext, text: np.ndarray[Any, Any]) -> Tensor:
    ours, stranger = (SessionKV(Full(), context, _LENGTH) for _ in range(2))
    logits = []
    for first in range(0, _LENGTH, _CHUNK):
        chunk = text[first : first + _CHUNK].astype(np.int64)
        for session in (stranger, ours):
            session.stage(len(chunk))
        plan = StepPlan([stranger, ours], context.geometry, context.pool, mask_dtype=forward.compute_dtype)
        real = plan.spans[1].real
        step = Step(np.concatenate([chunk[::-1], chunk]), plan, range(real.start, real.stop))
        logits.append(forward.run(step).logits)
        for session in (stranger, ours):
            session.commit(session.length + len(chunk))
    return torch.cat(logits)
