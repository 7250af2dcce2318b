"""Model families: which of transformers' decoders are admitted, with which strategies, and how exactly.

Every class that transformers builds for text is tried out as a server does at its start (`backends/twin.py`), from
the configuration that the class has by default, and again with sizes drawn at random. A family that is admitted must
stay so at every size that its class can be built with.
"""

from __future__ import annotations

import argparse
import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from inference_engine.backends.base import Admitted
from inference_engine.backends.twin import TwinSizes, admit_config
from inference_engine.errors import ModelError
from inference_engine.kv.geometry import IMMOVABLE, UNROTATED
from inference_engine.kv.strategies import parse_strategy, strategy_names
from laboratory.evaluation import record

logger = logging.getLogger(__name__)

# Of families with a second network, for pictures or sound, that has its full size in a twin.
_LEFT_OUT = {
    "Phi4MultimodalForCausalLM": "its networks for pictures and sound take a minute to draw",
    "MossTranscribeDiarizeForConditionalGeneration": "its network for sound takes a quarter of a minute to draw",
}


@dataclass(kw_only=True, slots=True)
class Family:
    """What was found of one class. sizes: how many of those drawn it could be built with, and was admitted at."""

    name: str
    admitted: Admitted | None = None
    refusal: str = ""
    sizes: int = 0
    differences: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        if self.admitted is None:
            return {"family": self.name, "admitted": False, "refusal": self.refusal}
        layers = Counter(trait.rotary for trait in self.admitted.traits)
        tried = {parse_strategy(name).name for name in self.differences}
        return {
            "family": self.name,
            "admitted": True,
            "strategies": ", ".join(name for name in strategy_names() if name in tried),
            "not_had": ", ".join(name for name in strategy_names() if name not in tried),
            "largest_difference": max(self.differences.values()),
            "of": max(self.differences, key=lambda name: self.differences[name]),
            "unrotated_layers": layers[UNROTATED],
            "immovable_layers": layers[IMMOVABLE],
            "layers": len(self.admitted.traits),
            "sizes": self.sizes,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, default=3, metavar="N", help="random sizes tried of each family")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sizes, weights and tokens")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="classes whose name contains one of these")


def main(arguments: argparse.Namespace, _target: object) -> dict[str, Any]:
    """Try out every family; returns the payload of a record."""
    found: list[Family] = []
    left_out: dict[str, str] = {}
    for config, kind in families(arguments.only or ("",)):
        if (why := _LEFT_OUT.get(kind.__name__)) is not None:
            left_out[kind.__name__] = why
        elif config is None:
            left_out[kind.__name__] = "its configuration has no values that it accepts by default"
        else:
            found.append(try_out(config, kind, sizes=1 if arguments.quick else arguments.sizes, seed=arguments.seed))
    admitted = [family for family in found if family.admitted is not None]
    worst: dict[str, float] = {}
    for family in admitted:
        for name, difference in family.differences.items():
            worst[parse_strategy(name).name] = max(difference, worst.get(parse_strategy(name).name, 0.0))
    faults = [fault for family in found for fault in family.faults]
    values = {
        "families admitted": record.exact(len(admitted), "families"),
        "families refused": record.exact(len(found) - len(admitted), "families"),
        "sizes tried": record.exact(sum(family.sizes for family in admitted), "twins"),
        "faults": record.exact(len(faults), "twins"),
        **{f"largest difference, {name}": record.exact(value, "of the largest logit") for name, value in worst.items()},
    }
    return {
        "what": "Which decoders of transformers are served, and with which strategies: small random twins of each "
        "class, run through the attention seam.",
        "config": {"sizes": arguments.sizes},
        "seeds": {"sizes, weights, tokens": arguments.seed},
        "values": values,
        "headlines": ["families admitted", "faults"],
        "baseline": "the same twin in its own eager attention; for windows, plain attention under the strategy's rule, "
        "with moved keys that the model computes itself",
        "tables": {
            "admitted": [family.row() for family in admitted],
            "refused": [family.row() for family in found if family.admitted is None],
            "left out": [{"family": name, "why": why} for name, why in left_out.items()],
            "faults": [{"fault": fault} for fault in faults],
        },
    }


def families(parts: Sequence[str] = ("",)) -> Iterator[tuple[PretrainedConfig | None, type[PreTrainedModel]]]:
    """Each class that generates text, once, with its default configuration; None if that is refused by itself.

    parts: of names. A class with none of them is not even imported.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    seen: set[type[PreTrainedModel]] = set()
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if not any(part in each for part in parts for each in ([name] if isinstance(name, str) else name)):
            continue
        kind_of_config = CONFIG_MAPPING[model_type]
        classes = MODEL_FOR_CAUSAL_LM_MAPPING[kind_of_config]
        for kind in classes if isinstance(classes, (list, tuple)) else (classes,):
            if kind in seen or not any(part in kind.__name__ for part in parts):
                continue
            seen.add(kind)
            try:
                config = kind_of_config()
            except Exception:
                logger.debug("%s has no default configuration", kind.__name__, exc_info=True)
                config = None
            yield config, kind


def try_out(config: PretrainedConfig, kind: type[PreTrainedModel], *, sizes: int, seed: int) -> Family:
    """One family, at the usual sizes and at random ones."""
    family = Family(name=kind.__name__)
    try:
        family.admitted = admit_config(config, kind, seed=seed)
    except ModelError as error:
        family.refusal = str(error)
        return family
    _note(family, family.admitted)
    rng = random.Random(f"{seed} {kind.__name__}")
    for number in range(sizes):
        drawn = TwinSizes(
            hidden=rng.choice((48, 64, 96)),
            head_dim=rng.choice((8, 16, 24, 32)),
            kv_heads=rng.choice((1, 2, 3)),
            group=rng.choice((1, 2, 3, 4)),
        )
        try:
            found = admit_config(config, kind, seed=seed + 1 + number, sizes=drawn)
        except ModelError as error:
            if error.__cause__ is None:
                family.faults.append(f"{family.name} with {drawn}: {error}")
            else:
                logger.info("%s cannot be built with %s", family.name, drawn)
            continue
        family.sizes += 1
        _note(family, found)
        if found.traits != family.admitted.traits:
            family.faults.append(f"{family.name} with {drawn}: its layers differ from those at the usual sizes")
    return family


def _note(family: Family, found: Admitted) -> None:
    for name, difference in found.differences:
        family.differences[name] = max(difference, family.differences.get(name, 0.0))
    family.faults += [f"{family.name}: {name}: {why}" for name, why in found.refused]
