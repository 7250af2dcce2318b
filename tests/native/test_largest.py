"""The ids of the largest logits, which a step finds beside them."""

from __future__ import annotations

import numpy as np
import pytest

from inference_engine.backends.native.program import Program
from inference_engine.models.operations import Embed, Product, Select, StepList
from inference_engine.native.library import NativeStep, ProductIdentity
from tests.native.test_failures import _Tensors
from tests.tiny_native import library

LARGE = 3e38  # times 10 it is infinite
ROWS = 4  # the first two have finite logits, one of them is infinite in the third, all are no numbers in the fourth


@pytest.mark.parametrize("vocabulary", [20, 4096, 9001])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_the_lower_id_of_its_largest_logits_or_none(vocabulary: int, threads: int) -> None:
    words = np.zeros((ROWS, 16), np.float32)
    words[:, 0] = [1, -1, 1, np.nan]
    words[2, 1] = LARGE
    operations = (
        Embed(output="hidden", matrix="words"),
        Select(input="hidden", output="last"),
        Product(input="last", output=None, matrices=("head",)),
    )
    widths = {"hidden": 16, "last": 16}
    rng = np.random.default_rng(vocabulary)
    for spoilt in (0, vocabulary // 2, vocabulary - 1):
        for sign in (1, -1):
            head = np.zeros((vocabulary, 16), np.float32)
            head[:, 0] = rng.standard_normal(vocabulary).round()  # with many equals
            head[spoilt, 1] = 10 * sign
            steps = StepList(operations=operations, widths=widths, layers=(), hidden=16, vocabulary=vocabulary)
            padded = np.concatenate([words, np.zeros((vocabulary - ROWS, 16), np.float32)])
            program = Program(
                library(),
                steps,
                _Tensors(words=padded, head=head),
                {},
                trained_positions=8,
                identity=ProductIdentity.EXACT,
                threads=threads,
            )
            places, logits = np.arange(ROWS), np.empty((ROWS, vocabulary), np.float32)
            largest = np.full(ROWS, 7, np.int64)
            program.run(
                NativeStep(
                    ids=places.ctypes.data,
                    positions=places.ctypes.data,
                    logit_queries=places.ctypes.data,
                    logits=logits.ctypes.data,
                    largest=largest.ctypes.data,
                    tokens=ROWS,
                    logit_count=ROWS,
                    vocabulary=vocabulary,
                )
            )
            program.close()

            assert np.isfinite(logits).all(axis=1).tolist() == [True, True, False, False]
            assert np.isfinite(logits[2]).sum() == vocabulary - 1
            assert largest.tolist() == [logits[0].argmax(), logits[1].argmax(), -1, -1]
