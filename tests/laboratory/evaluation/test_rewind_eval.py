"""Going back is measured against sessions that are given the ids that stay, and says what those say."""

from __future__ import annotations

from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from laboratory.evaluation.models import Target
from laboratory.evaluation.rewind import ANEW, REWOUND, measure
from tests.tiny import VOCABULARY

TEXT = [(7 * place) % VOCABULARY for place in range(200)]


def test_both_say_the_same_and_none_is_left_behind(tiny_target: Target) -> None:
    strategies = {str(one): one for one in (Full(), SinkWindow(sink=2, window=8))}
    places = {"within": 100, "behind": 90}
    found = measure(tiny_target.engine, strategies, TEXT[:108], TEXT[108:113], places=places, rounds=1)
    assert len(found) == 8
    for (name, place, method), (one,) in found.items():
        (other,) = found[name, place, ANEW if method == REWOUND else REWOUND]
        assert one.token_ids == other.token_ids
        assert one.first_token_seconds > 0
        if method == ANEW or place == "behind":  # a layer of the model has a window of its own
            assert one.prefilled_tokens == places[place] + 5
        elif place == "within":
            assert one.prefilled_tokens == 1 + 5
    assert not tiny_target.engine.list_sessions()
