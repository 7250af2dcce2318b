"""A target to evaluate: the engine that the server uses, on one model, with the tokenizer that a client would have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference_engine.compose import drafter_identity, find_drafter, find_f_theta_alone, open_backend
from inference_engine.config import EngineConfig, ModelConfig, configure_threads_environment, forbid_model_hub
from inference_engine.errors import ModelError
from inference_engine.models import check_model, tokenizer_folder, weights_digest
from inference_engine.models.folder import read_json
from laboratory.evaluation.haystack import Texts
from laboratory.evaluation.self_talk import SelfTalk

if TYPE_CHECKING:
    from inference_engine.backends.base import Forward
    from inference_engine.decode.draft import Drafter
    from inference_engine.engine import Engine
    from inference_engine.kernels.components import ModelComponents
    from inference_engine.kv.context import TokenCodec

    FindDrafter = Callable[[ModelConfig, Forward], Drafter | None]
    IdentifyDrafter = Callable[[ModelConfig, Forward], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Target:
    """stop_ids: every id that ends a turn or a text of this model. weights_sha256: of the weights: records of equal
    weights have it in common, whatever their folder is called.

    `forward`, `latent` and `components` are for evaluations that need further engines on the same weights, one after
    another. `texts` are what this target is evaluated on, in its own ids. latent_identity, components_identity,
    identify_drafter: what identifies its latent, its components of keys and its drafters.
    """

    engine: Engine
    forward: Forward
    tokenizer: Any
    stop_ids: tuple[int, ...]
    model: ModelConfig
    weights_sha256: str
    latent: TokenCodec | None = None
    latent_identity: Mapping[str, Any] = field(default_factory=dict)
    f_theta_identity: Mapping[str, Any] = field(default_factory=dict)
    components: ModelComponents | None = None
    components_identity: Mapping[str, Any] = field(default_factory=dict)
    find_drafter: FindDrafter = find_drafter
    identify_drafter: IdentifyDrafter = drafter_identity
    texts: Texts = field(init=False)

    def __post_init__(self) -> None:
        talk = SelfTalk(self.engine, self.tokenizer, self.stop_ids)
        object.__setattr__(self, "texts", Texts(self.tokenizer, talk))

    @property
    def model_id(self) -> str:
        return self.engine.info().facts.model_id

    @property
    def can_chat(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def drafter(self, name: str) -> Drafter | None:
        """A drafter for `forward`, called as in the settings. Raises ModelError for one that cannot be had."""
        return self.find_drafter(replace(self.model, drafter=name), self.forward)

    def drafter_identity(self, name: str) -> Mapping[str, Any]:
        """Identifies the drafter that `drafter` returns among others of its kind."""
        return self.identify_drafter(replace(self.model, drafter=name), self.forward)

    def describe(self) -> dict[str, Any]:
        """What a record's config says of the target: what ran where, and the settings that numbers depend on."""
        return {
            **described(self.engine, self.model),
            "weights_sha256": self.weights_sha256,
            **({} if self.latent is None else {"latent": dict(self.latent_identity)}),
            **({"f_theta": dict(self.f_theta_identity)} if self.f_theta_identity else {}),
            **({} if self.components is None else {"components": dict(self.components_identity)}),
        }


def described(engine: Engine, model: ModelConfig) -> dict[str, Any]:
    """What ran where, by which settings, whatever the weights are."""
    import torch

    facts, config = engine.info().facts, engine.config
    return {
        "model": facts.model_id,
        "device": torch.cuda.get_device_name(facts.device) if facts.device.startswith("cuda") else facts.device,
        "dtype": facts.dtype,
        "backend": facts.backend,
        "numerics": facts.numerics,
        "kv_dtype": facts.kv_dtype or facts.dtype,
        "linear": model.linear,
        "mode": facts.mode.value,
        "segment_tokens": config.segment_tokens,
        "page_tokens": config.page_tokens,
        "step_tokens": config.step_tokens,
        "max_batch": config.max_batch,
    }


@contextmanager
def open_target(
    model: ModelConfig,
    engine: EngineConfig,
    *,
    latent: TokenCodec | None = None,
    latent_identity: Mapping[str, Any] | None = None,
    components: ModelComponents | None = None,
    components_identity: Mapping[str, Any] | None = None,
    find_drafter: FindDrafter = find_drafter,
    identify_drafter: IdentifyDrafter = drafter_identity,
) -> Iterator[Target]:
    """Load the model and its tokenizer and start an engine, with `latent` if sessions are to be restored from it, and
    `components` if they are to choose tokens by them.

    The engine drafts nothing; evaluations that need drafts get a drafter from the target.

    Raises ModelError, BackendError or ConfigError for what cannot be had.
    """
    configure_threads_environment()
    forbid_model_hub()
    folder = tokenizer_folder(model.model, model.cache_path)
    checked = check_model(model.model, cache=model.cache_path)
    tokenizer = load_tokenizer(folder)

    from inference_engine.engine import Engine

    forward = open_backend(model)
    f_theta, why_no_f_theta = find_f_theta_alone(model, forward)
    with Engine(
        forward,
        engine,
        latent=latent,
        f_theta=f_theta,
        why_no_f_theta=why_no_f_theta,
        components=components,
    ) as running:
        yield Target(
            engine=running,
            forward=forward,
            tokenizer=tokenizer,
            stop_ids=stop_ids(folder, tokenizer),
            model=model,
            weights_sha256=weights_digest(checked),
            latent=latent,
            latent_identity=latent_identity or {},
            f_theta_identity={} if f_theta is None else f_theta.identity,
            components=components,
            components_identity=components_identity or {},
            find_drafter=find_drafter,
            identify_drafter=identify_drafter,
        )


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # Whatever a folder from somewhere else makes the library raise, it is the folder's fault.
        raise ModelError(f"{folder}: transformers cannot load its tokenizer: {error}") from error


def stop_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's own end, and those that the model's generation settings name."""
    found = {tokenizer.eos_token_id} - {None}
    if (settings := folder / "generation_config.json").is_file():
        named = read_json(settings).get("eos_token_id")
        found |= set(named if isinstance(named, list) else [named]) - {None}
    if not found:
        raise ModelError(f"{folder}: neither the tokenizer nor generation_config.json names an end-of-text token")
    return tuple(sorted(found))
