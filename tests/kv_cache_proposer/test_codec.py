"""What a latent codec promises: exact bytes, less error for more of them, layers that come back alone."""

import math

import pytest
import torch

from kv_cache_proposer.f_theta import fit as fitting
from kv_cache_proposer.f_theta.basis import Basis
from kv_cache_proposer.f_theta.codec import GroupCoder, LatentCodec
from kv_cache_proposer.f_theta.components import PRECISIONS
from kv_cache_proposer.f_theta.fit import fit
from kv_cache_proposer.f_theta.importance import from_projections, unweighted
from kv_cache_proposer.f_theta.levels import LEADING, levels
from tests.kv_cache_proposer.correlated import (
    SHAPES,
    make_codec,
    make_entries,
    make_projections,
    make_statistics,
    relative_error,
)

# Products over other numbers of entries may round otherwise; a code next to an edge may then move by one level.
FLOAT32 = 1e-4
# What components that are nearly the leading ones change.
NEARLY = 0.02

LAYERS = tuple(shape.layer for shape in SHAPES)


@pytest.fixture(scope="module")
def codec() -> LatentCodec:
    return make_codec(24)


def test_the_leading_components_have_levels_with_long_tails_however_few_bits() -> None:
    for part in make_codec(24, group_layers=3).coders:
        assert len(part.packing.widths) > LEADING
        for place, width in enumerate(part.packing.widths):
            first, size = int(part.levels.first[place]), int(part.levels.size[place])
            assert torch.equal(part.levels.values[first : first + size], levels(width, has_tails=place < LEADING))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_token_takes_exactly_the_bytes_asked_for(precision: str, subtests: pytest.Subtests) -> None:
    for bytes_per_token in (6, 7, 13, 24, 41):
        with subtests.test(str(bytes_per_token)):
            codec = make_codec(bytes_per_token, precision=precision)
            entries = make_entries(37)
            codes = codec.encode(entries.keys, entries.values)
            assert codec.bytes_per_token == bytes_per_token
            assert codes.shape == (37, bytes_per_token)
            assert codes.dtype == torch.uint8


@pytest.mark.parametrize("group_layers", [1, 2, 5])
def test_more_bytes_mean_less_error(group_layers: int) -> None:
    codec = make_codec(48, group_layers=group_layers)
    entries = make_entries(500, seed=2)
    errors = [relative_error(codec.at(size), entries) for size in (10, 14, 20, 30, 48)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 8


def test_a_codec_taken_down_equals_one_fitted_there() -> None:
    entries = make_entries(50)
    down, fitted = make_codec(40).at(17), make_codec(17)
    assert torch.equal(down.encode(entries.keys, entries.values), fitted.encode(entries.keys, entries.values))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bases_are_held_once_however_many_sessions_ask_for_however_few_bytes(precision: str) -> None:
    codec = make_codec(40, precision=precision)
    held = {place for part in codec.coders for place in _storages(part.basis)}
    for bytes_per_token in (12, 17, 24, 40):
        down = codec.at(bytes_per_token)
        assert {place for part in down.coders for place in _storages(part.basis)} <= held
        assert codec.at(bytes_per_token) is down


def _storages(basis: Basis) -> list[int]:
    """Where its matrices lie."""
    own = basis.components
    tensors = [own.entries, own.scales, basis.deviations, basis.mean, *basis.weights, *basis.inverses]
    return [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("group_layers", [1, 2, 5])
def test_all_layers_of_a_group_come_back_together_as_one_by_one(group_layers: int, precision: str) -> None:
    entries = make_entries(29)
    for part in make_codec(41, group_layers=group_layers, precision=precision).coders:
        places = [LAYERS.index(shape.layer) for shape in part.basis.group.shapes]
        codes = part.encode([entries.keys[place] for place in places], [entries.values[place] for place in places])
        coefficients = part.coefficients(codes)
        together = part.basis.synthesise_all(coefficients)
        for index, pair in enumerate(together):
            for entries_of_all, own in zip(pair, part.basis.synthesise(coefficients, index), strict=True):
                torch.testing.assert_close(entries_of_all, own, atol=FLOAT32, rtol=FLOAT32)


def test_entries_far_from_the_calibration_text_are_followed_by_the_scale(codec: LatentCodec) -> None:
    usual, far = make_entries(200, seed=3), make_entries(200, seed=3, outlier=5.0)
    # Levels reach some ten deviations, and so far away nothing but the scale can follow.
    farther = make_entries(200, seed=3, outlier=50.0)
    assert relative_error(codec, far) < 2 * relative_error(codec, usual)
    assert relative_error(codec, farther) < 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_entry_that_is_not_finite_harms_no_other(codec: LatentCodec, bad: float) -> None:
    entries, spoilt = make_entries(5), make_entries(5)
    spoilt.keys[2][3, 1, 2] = bad
    reported, others = (codec.encode(some.keys, some.values) for some in (entries, spoilt))
    kept = [0, 1, 2, 4]
    assert torch.equal(reported[kept], others[kept])


@pytest.mark.parametrize(("precision", "itemsize", "worse"), [("float16", 2, 1.001), ("int8", 1, 1.1)])
def test_rounded_components_take_less_and_lose_little(precision: str, itemsize: int, worse: float) -> None:
    plain, rounded = make_codec(24, precision="float32"), make_codec(24, precision=precision)
    entries = make_entries(500, seed=2)
    saved = sum(part.basis.components.entries.numel() * (4 - itemsize) for part in rounded.coders)
    added = sum(part.basis.components.nbytes - part.basis.components.entries.nbytes for part in rounded.coders)
    assert plain.shared_bytes - rounded.shared_bytes == saved - added
    assert relative_error(rounded, entries) < worse * relative_error(plain, entries)


def test_a_rough_decomposition_loses_no_more_and_gives_way_where_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "NARROW", 8)
    monkeypatch.setattr(fitting, "COMPONENTS_PER_BYTE", 4)
    entries = make_entries(400, seed=5)
    statistics = make_statistics(group_layers=5)
    importances = from_projections(statistics, make_projections())
    assert statistics.groups[0].width > fitting.components_sought(12, len(statistics.groups))
    exact, rough = (fit(statistics, importances, bytes_per_token=12, is_rough=is_rough) for is_rough in (False, True))
    assert relative_error(rough, entries) == pytest.approx(relative_error(exact, entries), rel=NEARLY)
    assert not all(_is_same(*pair) for pair in zip(exact.coders, rough.coders, strict=True))
    # Too few are looked for, and all of them would get bits.
    monkeypatch.setattr(fitting, "COMPONENTS_PER_BYTE", 1)
    rough = fit(statistics, importances, bytes_per_token=12, is_rough=True)
    assert all(_is_same(*pair) for pair in zip(exact.coders, rough.coders, strict=True))
    # One cause that dwarfs all others: what else there is would be lost in rounding.
    monkeypatch.setattr(fitting, "COMPONENTS_PER_BYTE", 4)
    dwarfed = make_entries(400, seed=5)
    dwarfed.keys[0][:, 0, 0] *= 1e5
    statistics = make_statistics(dwarfed, group_layers=5)
    importances = unweighted(statistics.shapes)
    exact, rough = (fit(statistics, importances, bytes_per_token=12, is_rough=is_rough) for is_rough in (False, True))
    assert all(_is_same(*pair) for pair in zip(exact.coders, rough.coders, strict=True))


def _is_same(one: GroupCoder, other: GroupCoder) -> bool:
    return torch.equal(one.basis.components.entries, other.basis.components.entries)
