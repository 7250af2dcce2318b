"""Lattice compressors: every decoded block is a lattice point, the nearest one, packed in the fewest bits."""

from __future__ import annotations

import itertools

import kakeyalattice
import pytest
import torch
from torch import Tensor

from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument
from inference_engine.kv.compressors import COMPRESSORS, make_compressor
from inference_engine.kv.compressors.rotated import rotate
from inference_engine.kv.compressors.scales import load_scales
from inference_engine.kv.strategies import parse_strategy
from inference_engine.types import Mode
from kakeya_lattice import CODECS, D4, E8, Lattice, even_points
from tests.kv.codec_cases import KINDS, gaussian, lengths, vectors_of
from tests.laws.variants import generate, text
from tests.tiny_native import served_engine

REACHES = (4, 9, 37, 75, 151)
each_lattice = pytest.mark.parametrize(
    "lattice",
    [kind(reach=reach, is_fitted=fitted) for kind in (D4, E8) for reach in REACHES for fitted in (False, True)],
    ids=str,
)


def points_of(lattice: Lattice, codes: Tensor, head_dim: int) -> Tensor:
    """[N, D]: what `codes` decode to in units of their scales, undoing rotation and scale in float64."""
    scale = load_scales(codes[:, :2].t().contiguous(), 1)[0].double()
    turned = rotate(lattice.decode(codes, head_dim).t().double()).t() / head_dim
    return turned / torch.where(scale == 0, 1.0, scale)[:, None]


def off_lattice(lattice: Lattice, points: Tensor) -> Tensor:
    """[N, D] -> [N, blocks]: which blocks are no lattice points."""
    halves = (points * 2).round()
    assert (points * 2 - halves).abs().max() < 0.01, "not even half numbers"
    blocks = halves.long().view(len(halves), -1, lattice.block)
    same = (blocks % 2 == (blocks[..., :1] % 2 if isinstance(lattice, E8) else 0)).all(-1)
    is_point: Tensor = same & (blocks.sum(-1) % 4 == 0)
    return ~is_point


@each_lattice
def test_every_block_is_a_lattice_point_within_reach(lattice: Lattice, subtests: pytest.Subtests) -> None:
    for head_dim in [8, 64, 256]:
        with subtests.test(str(head_dim)):
            vectors = torch.cat([vectors_of(kind, 60, head_dim, seed=5) for kind in KINDS])
            points = points_of(lattice, lattice.encode(vectors), head_dim)
            assert not off_lattice(lattice, points).any()
            assert points.abs().max() <= lattice.reach + (0.51 if isinstance(lattice, E8) else 0.01)


@pytest.mark.parametrize(("size", "reach"), [(4, 2), (4, 9), (8, 2)])
def test_no_point_with_an_even_sum_is_nearer(size: int, reach: int) -> None:
    blocks = (torch.rand(400, size, generator=torch.Generator().manual_seed(6)) - 0.5) * (2 * reach + 0.8)
    found = even_points(blocks[:, :, None], reach)[:, :, 0]
    steps = torch.tensor(list(itertools.product((-1.0, 0.0, 1.0), repeat=size)))
    candidates = blocks.round().clamp(-reach, reach)[:, None] + steps
    distances = (candidates - blocks[:, None]).square().sum(-1)
    allowed = (candidates.sum(-1) % 2 == 0) & (candidates.abs() <= reach).all(-1)
    nearest = distances.masked_fill(~allowed, torch.inf).amin(-1)
    assert torch.allclose((found - blocks).square().sum(-1), nearest, atol=1e-5)


@pytest.mark.parametrize("lattice", [D4(reach=2), D4(reach=151), E8(reach=2), E8(reach=151)], ids=str)
def test_the_outermost_points_survive_packing(lattice: Lattice) -> None:
    corners = torch.tensor(list(itertools.product((-lattice.reach, lattice.reach), repeat=lattice.block)))
    points = corners.float().t()
    points = torch.cat((points, points.abs(), torch.zeros_like(points)))
    points = points + 0.5 if isinstance(lattice, E8) else points
    assert torch.equal(lattice._unpack(lattice._pack(points), len(points)), points)


def test_a_fitted_scale_loses_less(subtests: pytest.Subtests) -> None:
    vectors = gaussian(500, 64)
    for name in ("d4q9", "e8q7"):
        with subtests.test(name):
            plain, fitted = (
                lengths(compressor.decode(compressor.encode(vectors), 64) - vectors)
                for compressor in (make_compressor(name), make_compressor(f"{name}fit"))
            )
            assert (fitted <= plain * (1 + 1e-6)).all(), "never more, for any vector"
            assert fitted.square().sum() < 0.95 * plain.square().sum()


def test_they_are_known_by_name_once_they_are_installed() -> None:
    assert [make_compressor(codec.name) for codec in CODECS] == list(CODECS)
    assert COMPRESSORS.package("d4q9").startswith("kakeya-lattice-codecs ")


def test_a_head_smaller_than_a_block_is_refused(subtests: pytest.Subtests) -> None:
    for name, least in (("d4q9", 4), ("e8q31", 8)):
        with subtests.test(name):
            make_compressor(name).check(least)
            with pytest.raises(InvalidArgument, match=f"from {least} to"):
                make_compressor(name).check(least // 2)


@pytest.mark.parametrize("mode", Mode)
def test_a_session_keeps_entries_in_them(mode: Mode) -> None:
    """Natively and in torch, by the option that clients send: near to `full`, and not `full` itself."""
    with served_engine(mode=mode) as engine:
        full, coded = (
            torch.tensor([logprob or 0.0 for _, logprob in generate(engine, opened(engine, strategy), 6)])
            for strategy in ("full", "full:codec=e8q31,exact_window=16")
        )
    assert 0 < float((full - coded).abs().max()) < 0.1


def opened(engine: Engine, strategy: str) -> str:
    session = engine.create_session(strategy=parse_strategy(strategy)).session_id
    engine.append(session, text())
    return session


@pytest.mark.parametrize("name", ["d4q9", "d4q151", "e8q31"])
def test_coding_again_changes_nothing_where_the_outermost_entry_is_at_the_reach(name: str) -> None:
    lattice = make_compressor(name)
    assert isinstance(lattice, Lattice)
    codes = lattice.encode(gaussian(500, 64))
    outermost = points_of(lattice, codes, 64).abs().amax(-1)
    kept = codes[(outermost - lattice.reach).abs() < 0.01]
    assert len(kept) > 100
    assert torch.equal(lattice.encode(lattice.decode(kept, 64)), kept)


# -- against the package --------------------------------------------------------------------------------------------


def uneven(head_dim: int) -> Tensor:
    """Vectors whose channels are of different sizes, as real keys are."""
    return gaussian(2000, head_dim) * gaussian(head_dim, seed=8).exp()


def clear_of_borders(vectors: Tensor) -> Tensor:
    """Those whose two scales, which the package holds in float16, round alike in whatever order a machine adds."""
    norms = vectors.norm(dim=1)
    largest = (rotate((vectors / norms[:, None]).t()).t() / vectors.shape[1] ** 0.5).abs().amax(dim=1)
    are_clear = [(scale * (1 - 5e-6)).half() == (scale * (1 + 5e-6)).half() for scale in (norms, largest)]
    return vectors[are_clear[0] & are_clear[1]]


def package_points(vectors: Tensor, reach: int, restored: Tensor) -> Tensor:
    """The package's reconstruction in units of its own two scales."""
    norms = vectors.norm(dim=1, keepdim=True)
    turned = rotate((vectors / norms).t()).t() / vectors.shape[1] ** 0.5
    largest = turned.abs().amax(dim=1, keepdim=True)
    back = rotate((restored / norms.half().float()).t().double()).t() / vectors.shape[1] ** 0.5
    points: Tensor = back / largest.half().double() * reach
    return points


@pytest.mark.parametrize("reach", [9, 37, 75, 151])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_d4_errs_as_the_package_does(reach: int, head_dim: int) -> None:
    ours, vectors = D4(reach=reach), uneven(head_dim)
    theirs = kakeyalattice.V14KakeyaZamirLatticeGPU(head_dim, q_range=reach, device="cpu").roundtrip(vectors)
    error, reference = (
        float((decoded - vectors).square().sum()) for decoded in (ours.decode(ours.encode(vectors), head_dim), theirs)
    )
    # Scales of nine bits here, of eleven there: a few vectors fall to the other side of a border.
    assert error == pytest.approx(reference, rel=2e-3)


@pytest.mark.parametrize("reach", [9, 37, 75, 151])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_e8_errs_as_the_package_does_where_that_gives_lattice_points(reach: int, head_dim: int) -> None:
    ours, vectors = E8(reach=reach), clear_of_borders(uneven(head_dim))
    assert len(vectors) > 1800
    theirs = kakeyalattice.V15KakeyaZamirE8GPU(head_dim, q_range=reach, device="cpu").roundtrip(vectors)
    is_off = off_lattice(ours, package_points(vectors, reach, theirs)).any(-1)
    assert 0.02 < is_off.double().mean() < 0.3, "the package leaves the lattice for some vectors"
    error, reference = (
        (decoded - vectors).square().sum(-1) for decoded in (ours.decode(ours.encode(vectors), head_dim), theirs)
    )
    assert float(error[~is_off].sum()) == pytest.approx(float(reference[~is_off].sum()), rel=5e-3)
    # What the package gains by points that cannot be stored.
    assert error.sum() <= reference.sum() * 1.02
