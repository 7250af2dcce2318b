"""A message is converted and checked on the event loop, where others wait: at its limits it takes few steps.

Steps are counted, not time: the same count on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch

from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument
from inference_engine.kernels.sampler import Sampler
from inference_engine.server import convert
from inference_engine.server.message_limits import GENERATE_BYTES
from inference_engine.session.replies import identify
from inference_engine.types import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_SET_NUMBERS,
    MAX_STOP_SEQUENCES,
    MAX_STOP_TOKEN_IDS,
)
from kakeya.v1 import runtime_pb2 as pb
from tests.tiny import VOCABULARY, tiny_engine

MOST_STEPS = 16_000  # a few milliseconds; biases are looked at one by one
_LARGE = 2**18  # a vocabulary
_IN_RANGE = [number % VOCABULARY for number in range(MAX_SET_NUMBERS)]
_APART = list(range(0, 2 * MAX_SET_NUMBERS, 2))  # joined to no ranges
_MANY_IDS = [1] * (GENERATE_BYTES - 64)
_MANY_LISTS = [pb.TokenIds()] * (GENERATE_BYTES // 3 - 64)
_CHOICES = [pb.TokenIds(token_ids=[number % VOCABULARY, number // VOCABULARY] * 8) for number in range(MAX_CHOICES)]
_SEQUENCES = [pb.TokenIds(token_ids=[number] * 16) for number in range(MAX_STOP_SEQUENCES)]
FIELDS: dict[str, dict[str, Any]] = {
    "allowed ids": {"allowed_token_ids": pb.TokenSet(token_ids=_IN_RANGE)},
    "banned ids apart": {"banned_token_ids": pb.TokenSet(token_ids=_APART)},
    "allowed ranges apart": {"allowed_token_ids": pb.TokenSet(ranges=_APART)},
    "logit_bias": {"logit_bias": {token_id % VOCABULARY: 1.0 for token_id in range(MAX_LOGIT_BIAS)}},
    "too many biases": {"logit_bias": dict.fromkeys(range(GENERATE_BYTES // 12), 1.0)},
    "stop_token_ids": {"stop_token_ids": [1] * MAX_STOP_TOKEN_IDS},
    "too many stop ids": {"stop_token_ids": _MANY_IDS},
    "stop_sequences": {"stop_sequences": _SEQUENCES},
    "too many stop sequences": {"stop_sequences": _MANY_LISTS},
    "too many ids of a stop sequence": {"stop_sequences": [pb.TokenIds(token_ids=_MANY_IDS)]},
    "choices": {"constraint": pb.Constraint(choice=pb.TokenChoice(choices=_CHOICES))},
    "too many choices": {"constraint": pb.Constraint(choice=pb.TokenChoice(choices=_MANY_LISTS))},
    "too many ids of a choice": {
        "constraint": pb.Constraint(choice=pb.TokenChoice(choices=[pb.TokenIds(token_ids=_MANY_IDS)]))
    },
}


class Steps:
    """Lines of Python that ran in `counted`."""

    def __init__(self) -> None:
        self.count = 0

    def _saw(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        self.count += event == "line"
        return self._saw

    @contextmanager
    def counted(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._saw)
        try:
            yield
        finally:
            sys.settrace(before)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with tiny_engine() as engine:
        yield engine


def test_a_generate_at_its_limits_takes_no_step_for_each_of_its_ids(engine: Engine, subtests: pytest.Subtests) -> None:
    session = engine.create_session(eos_token_ids=[]).session_id
    engine.append(session, [1, 2, 3])
    for number, (name, fields) in enumerate(FIELDS.items()):
        message = pb.GenerateRequest(session_id=session, max_tokens=1, **fields).SerializeToString()
        assert len(message) <= GENERATE_BYTES
        with subtests.test(name):
            steps = Steps()
            request = pb.GenerateRequest.FromString(message)
            try:
                with steps.counted():
                    params = convert.params_from_wire(request)
                    identify(bytes([number] * 16), params, owner="", session_id=session)
                    Sampler.start(params.sampling, 1, None, _LARGE, torch.device("cpu"))
                    list(engine.generate(session, params, request_id=bytes([number] * 16)))
            except InvalidArgument:
                assert "too many" in name or "apart" in name
            assert steps.count < MOST_STEPS, steps.count
