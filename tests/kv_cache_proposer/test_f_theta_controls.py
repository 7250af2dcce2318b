"""What must do worse than the fitted basis, importances and bits does so, through the same codec and at equal bytes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_cache_proposer.f_theta import alone
from kv_cache_proposer.f_theta.bit_allocation import allocate_uniformly
from kv_cache_proposer.f_theta.codec import QUANTISERS, LatentCodec
from kv_cache_proposer.f_theta.codec_errors import LatentError
from kv_cache_proposer.f_theta.codec_files import load_stated, read_stated, save_codec
from kv_cache_proposer.f_theta.components import PRECISIONS
from kv_cache_proposer.f_theta.fit import BASES, fit
from kv_cache_proposer.f_theta.importance import from_projections, unweighted
from kv_cache_proposer.f_theta.levels import MAX_BITS, distortion
from kv_cache_proposer.stored import CalibrationManifest
from tests.further import each_pair, further
from tests.kv_cache_proposer.correlated import make_entries, make_projections, make_statistics, relative_error

BYTES = 24
DISTORTIONS = [distortion(bits) for bits in range(MAX_BITS + 1)]


def made(basis: str = "fitted", bits: str = "variance", *, group_layers: int = 5, size: int = BYTES) -> LatentCodec:
    statistics = make_statistics(group_layers=group_layers)
    importances = from_projections(statistics, make_projections())
    return fit(statistics, importances, bytes_per_token=size, basis=basis, bits=bits)


@each_pair(kind=[("random", "variance"), ("fitted", "uniform")], group_layers=[2, 5], size=[8, 19])
def test_a_control_takes_the_same_bytes_and_loses_more(kind: tuple[str, str], group_layers: int, size: int) -> None:
    control = made(*kind, group_layers=group_layers).at(size)
    entries = make_entries(400, seed=2)
    assert control.bytes_per_token == size
    assert control.encode(entries.keys, entries.values).shape == (400, size)
    assert relative_error(control, entries) > 1.1 * relative_error(made(group_layers=group_layers, size=size), entries)


def test_uniform_bits_fill_the_bytes_exactly_with_one_width(subtests: pytest.Subtests) -> None:
    for total_bytes in (2, 5, 17, 31):
        with subtests.test(str(total_bytes)):
            variances = [torch.linspace(9.0, 0.1, 37) ** 2, torch.linspace(4.0, 0.0, 23) ** 2]
            shares = allocate_uniformly(variances, total_bytes, DISTORTIONS)
            assert sum(int(share.sum()) for share in shares) == 8 * total_bytes
            assert all(int(share.sum()) % 8 == 0 for share in shares)
            width = max(int(share.max()) for share in shares)
            for share in shares:
                given = share[share > 0].tolist()
                assert given == sorted(given, reverse=True)
                assert all(bits == width for bits in given[:-1])


def bases_and_quantisers() -> list[Any]:
    """Each with each of the other, in precisions by turns; in the others they are further cases."""
    return [
        (basis, precision, quantiser) if place == turn % len(PRECISIONS) else further(basis, precision, quantiser)
        for turn, (basis, quantiser) in enumerate(product(BASES, QUANTISERS))
        for place, precision in enumerate(PRECISIONS)
    ]


@pytest.mark.parametrize(("basis", "precision", "quantiser"), bases_and_quantisers())
def test_a_control_comes_back_from_disk_bit_for_bit(tmp_path: Path, basis: str, precision: str, quantiser: str) -> None:
    statistics = make_statistics(group_layers=5)
    codec = fit(
        statistics,
        unweighted(statistics),
        bytes_per_token=BYTES,
        precision=precision,
        basis=basis,
        bits="uniform",
        quantiser=quantiser,
    )
    save_codec(codec, tmp_path, CalibrationManifest(target_digest="5f", calibration_tokens=3000))
    loaded = load_stated(read_stated(tmp_path, target_digest="5f"))
    entries = make_entries(40)
    for size in (BYTES, 13):
        codes = codec.at(size).encode(entries.keys, entries.values)
        assert torch.equal(loaded.at(size).encode(entries.keys, entries.values), codes)
        restored, again = codec.at(size).decode(codes), loaded.at(size).decode(codes)
        assert all(torch.equal(a, b) for a, b in zip(restored[0], again[0], strict=True))
    assert loaded.shared_bytes == codec.shared_bytes


def test_a_codec_keeps_the_kernels_it_was_given() -> None:
    statistics = make_statistics(group_layers=5)
    codec = fit(statistics, unweighted(statistics), bytes_per_token=BYTES, kernels="plain")
    assert codec.kernels == codec.at(13).kernels == codec.to("cpu").kernels == "plain"
    assert codec.to("cpu", "auto").kernels == "auto"


@pytest.mark.parametrize("stated", ['"bits": "variance"', '"quantiser": "trellis"'])
def test_an_unknown_method_of_coding_is_refused(tmp_path: Path, stated: str) -> None:
    save_codec(made(), tmp_path, CalibrationManifest(target_digest="5f", calibration_tokens=3000))
    manifest = tmp_path / "latent.json"
    manifest.write_text(manifest.read_text().replace(stated, stated.partition(":")[0] + ': "lottery"'))
    with pytest.raises(LatentError, match="lottery"):
        load_stated(read_stated(tmp_path, target_digest="5f"))


@pytest.mark.parametrize(("bits", "known"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (5, 0.002499)])
def test_numbers_by_themselves_lose_no_more_than_they_must(bits: int, known: float) -> None:
    """Max, IRE Trans. Inf. Theory 6(1), 1960, Table I."""
    assert alone.distortion(bits) == pytest.approx(known, rel=1e-2)
