"""Archived tokens: restored to what the decoder says, once, and to the same bits each time; and analysed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.backends.native.decoders import RotationTables, native_decoder
from inference_engine.backends.native.entry_coder import NativeCoder
from inference_engine.backends.native.forward import KV_DTYPES
from inference_engine.kernels.components import IndexShape
from inference_engine.kernels.reads import COUNT, FLOOR, HEAD_SLOTS, RING
from inference_engine.kv.context import (
    ArchivedCodes,
    GroupAnalyser,
    HeldEntries,
    LayerDecoder,
    ReadLayer,
    RestoreCache,
    RestoredLayer,
    Rotate,
)
from inference_engine.native.library import KVType, NativeMatrix, ProductIdentity, Threads
from tests.further import further
from tests.kernels.rows import in_rows
from tests.native.test_selection import FREQUENCIES, HKV, D, Session, rotate
from tests.tiny_native import library

LENGTH, GONE, RING_SLOTS, KEPT = 700, 448, 300, 60
POSITIONS = np.arange(650, 700)


def make_decoder(count: int = 37, chains: int = 2) -> LayerDecoder:
    generator = torch.Generator().manual_seed(count)
    widths = torch.randint(1, 6, (count,), generator=generator, dtype=torch.int32)
    sizes = 2 ** (widths + 1)
    matrix = torch.randn(HKV, 2 * D, count, generator=generator) / 6
    return LayerDecoder(
        first_byte=5,
        chains=chains,
        scales=torch.rand(256, generator=generator) + 0.5,
        widths=widths,
        tables=(sizes.cumsum(0) - sizes).int(),
        levels=torch.randn(int(sizes.sum()), generator=generator),
        means=torch.randn(HKV, 2 * D, generator=generator),
        make_matrix=lambda: matrix,
    )


def no_rotation(keys: Tensor, shifts: Tensor, rotary: str) -> Tensor:
    raise AssertionError("restoring rotates by itself")


def made_coder(
    threads: Threads,
    *,
    level: str = "auto",
    kv_type: KVType = KVType.FLOAT32,
    identity: ProductIdentity = ProductIdentity.EXACT,
    turn: Rotate = no_rotation,
) -> NativeCoder:
    return NativeCoder(
        kernels=library().kernels(level),
        threads=threads,
        kv_type=kv_type,
        identity=identity,
        rotate=turn,
        turned={"default": 24},
        turns={"default": RotationTables.of(FREQUENCIES, 10_000)},
    )


def units_of(decoder: LayerDecoder, code: list[int]) -> Tensor:
    """The numbers of one token, one by one, as `LayerDecoder` describes them."""
    own = code[decoder.first_byte :]
    bits = "".join(f"{byte:08b}" for byte in own[1:])
    codes, first = [], 0
    for width in decoder.widths.tolist():
        codes.append(int(bits[first : first + width], 2))
        first += width

    def earlier(place: int, steps: int) -> int:
        place -= steps * decoder.chains
        return codes[place] & 1 if place >= 0 else 0

    units = []
    for place, number in enumerate(codes):
        subset = ((number & 1) ^ earlier(place, 1) ^ earlier(place, 3)) << 1 | earlier(place, 2)
        units.append(decoder.levels[int(decoder.tables[place]) + ((number >> 1) << 2) + subset])
    return torch.stack(units) * decoder.scales[own[0]]


def in_whole_numbers(decoder: LayerDecoder, codes: list[list[int]]) -> Tensor:
    """[Hkv, n, 2 · D]: the sums of products of whole numbers, each of 32 inputs times its scale."""
    product = native_decoder(decoder, ProductIdentity.EXACT).product
    levels, tables = torch.from_numpy(product.levels.astype(np.float32)), torch.from_numpy(product.tables)
    own = dataclasses.replace(decoder, levels=levels, tables=tables, scales=torch.ones(256))
    units = torch.stack([units_of(own, code) for code in codes]).double()
    tiles = product.whole
    assert tiles is not None
    heads, count, blocks, _ = tiles.shape
    scales = torch.from_numpy(tiles[..., -64:].copy().view(np.float32)).double()
    pairs = torch.from_numpy(tiles[..., :-64].copy().view(np.int16)).view(heads, count, blocks, 16, 16, 2).double()
    matrix = (pairs * scales[:, :, :, None, :, None]).permute(0, 1, 4, 2, 3, 5).reshape(heads, 16 * count, -1)
    units *= torch.tensor([decoder.scales[code[decoder.first_byte]] for code in codes])[:, None].double()
    return (units @ matrix[..., : units.shape[1]].mT).float()


def decode(decoder: LayerDecoder, codes: list[list[int]], identity: ProductIdentity) -> Tensor:
    """[Hkv, n, 2 · D], of levels and matrix as the library has them: of bytes with its own products, which
    `tests/native/test_matrix.py` is about."""
    structure = native_decoder(decoder, identity).structure
    if identity is ProductIdentity.EXACT:
        return in_whole_numbers(decoder, codes) + decoder.means[:, None]
    units = torch.stack([units_of(decoder, code) for code in codes]).contiguous()
    out = torch.empty(HKV, len(codes), 2 * D)
    with library().open_threads(1) as threads:
        for head, matrix in enumerate((NativeMatrix * HKV).from_address(structure.matrices)):
            library().kernels().linear(threads, matrix, identity, units.numpy(), out[head].numpy())
    exact = units @ decoder.make_matrix().mT
    assert (out - exact).square().mean() < 4e-4 * exact.square().mean()
    return out + decoder.means[:, None]


class Archived(Session):
    """A session whose entries between the sink and GONE are codes, and whose others lie in a ring buffer."""

    def __init__(
        self,
        decoder: LayerDecoder,
        *,
        slots: int = KEPT,
        rooms: int = 0,
        identity: ProductIdentity = ProductIdentity.EXACT,
        has_series: bool = True,
    ) -> None:
        self.sink = 3
        shape = IndexShape(rank=9, bits=3, run=1)
        super().__init__(shape, self.sink, 2, length=LENGTH, kept=KEPT, identity=identity, has_series=has_series)
        width = decoder.first_byte + 1 + -(-int(decoder.widths.sum()) // 8)
        half = -(-width // 2)
        codes = torch.randint(0, 256, (GONE - self.sink, 2 * half), generator=torch.Generator().manual_seed(1))
        self.halves = (codes[:, :half].to(torch.uint8).contiguous(), codes[:, half:].to(torch.uint8).contiguous())
        # What the reference reads: the archived entries as they come back.
        restored = decode(decoder, codes.tolist(), identity)
        self.keys[:, self.sink : GONE] = rotate(restored[..., :D], torch.arange(self.sink, GONE))
        self.values[:, self.sink : GONE] = restored[..., D:]
        held = torch.cat([torch.arange(self.sink), torch.arange(GONE, LENGTH)])
        places = torch.where(held < self.sink, held, self.sink + (held - self.sink) % RING_SLOTS)
        region = self.sink + RING_SLOTS
        buffers = []
        for states in (self.keys, self.values):
            regions = torch.full((HKV, region, D), torch.nan)
            regions[:, places] = states[:, held]
            buffers.append(torch.cat([regions.view(-1, D), torch.full((HKV * (slots + KEPT * rooms), D), torch.nan)]))
        self.buffers = in_rows(*buffers)
        self.archived = ArchivedCodes(halves=self.halves, first=self.sink, decoder=decoder)
        self.cache = RestoreCache(start=HKV * region, slots=slots, each=KEPT, most_rooms=rooms)
        self.rooms = [HKV * (region + slots + KEPT * room) for room in range(rooms)]
        self.open_cache()

    def open_cache(self) -> None:
        """A restore cache that holds nothing."""
        assert self.index.restore_from(self.archived, self.cache, torch.zeros(2))

    def lines(self, positions: np.ndarray) -> Tensor:
        lines = super().lines(positions)
        for field, number in ((HEAD_SLOTS, self.sink + RING_SLOTS), (COUNT, self.sink + RING_SLOTS)):
            lines[:, field] = number
        lines[:, RING], lines[:, FLOOR] = RING_SLOTS, GONE
        return lines

    def stored(self) -> tuple[Tensor, Tensor]:
        return self.buffers


@pytest.mark.parametrize(
    ("count", "chains", "identity"),
    [
        (count, chains, identity) if place % 2 == number else further(count, chains, identity)
        for place, (count, chains) in enumerate([(300, 2), (5, 1), (37, 2), (37, 37)])
        for number, identity in enumerate([ProductIdentity.EXACT, ProductIdentity.QUANTISED])
    ],
)
def test_chosen_tokens_are_read_as_the_decoder_gives_them(count: int, chains: int, identity: ProductIdentity) -> None:
    session = Archived(make_decoder(count, chains), identity=identity, has_series=False)
    queries = session.queries(len(POSITIONS))

    found = session.attend(queries, session.lines(POSITIONS), threads=2)

    torch.testing.assert_close(found, session.expected(queries, POSITIONS), atol=5e-4, rtol=5e-4)
    assert session.index.restored_all_finite


@pytest.mark.parametrize("kv_type", [KVType.FLOAT32, KVType.FLOAT16])
def test_a_run_is_restored_as_chosen_tokens_are(kv_type: KVType) -> None:
    """And its bits depend neither on where it begins nor on threads and instructions."""
    decoder = make_decoder()
    session = Archived(decoder)

    def run(first: int, end: int, level: str = "auto", threads: int = 1) -> Tensor:
        lib = library()
        with lib.open_threads(threads) as opened:
            coder = made_coder(opened, level=level, kv_type=kv_type)
            # Each head's entries lie in a longer region.
            regions = torch.full((2, HKV, end - first + 7, D), torch.nan, dtype=KV_DTYPES[kv_type])
            entries = regions[:, :, 3 : 3 + end - first]
            assert coder.restores(session.archived, "default")
            layer = RestoredLayer(codes=session.archived, rotary="default", keys=entries[0], values=entries[1])
            found = torch.zeros(1, 2)
            coder.restore([layer], first, found)
            assert found.isfinite().all()
            assert regions[:, :, :3].isnan().all() and regions[:, :, 3 + end - first :].isnan().all()
        return entries

    found = run(session.sink, GONE)
    expected = torch.stack([states[:, session.sink : GONE] for states in (session.keys, session.values)])
    tolerance = 1e-4 if kv_type is KVType.FLOAT32 else 5e-3
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
    for level in library().levels():
        assert torch.equal(run(100, 371, level, threads=2), found[:, :, 97:368]), level


def test_a_run_takes_what_the_restore_cache_holds_and_leaves_there_what_it_restored() -> None:
    """Whatever was chosen before, in rooms behind the first, as many as there are."""
    first, end, rooms = 100, 371, 3
    with library().open_threads(2) as threads:
        coder = made_coder(threads)

        def run(session: Archived, *, is_held: bool) -> Tensor:
            entries = torch.full((2, HKV, end - first, D), torch.nan)
            keys, values = session.buffers
            held = HeldEntries(index=session.index.number, keys=keys, values=values) if is_held else None
            of = RestoredLayer(codes=session.archived, rotary="default", keys=entries[0], values=entries[1], held=held)
            coder.restore([of], first, torch.zeros(1, 2))
            return entries

        other = Archived(make_decoder())
        expected, said = run(other, is_held=False), other.attend(other.queries(len(POSITIONS)), other.lines(POSITIONS))
        for chosen, taken in ((0, 0), (5, 1), (len(POSITIONS), 0)):
            session = Archived(make_decoder(), rooms=rooms)
            queries, lines = session.queries(len(POSITIONS)), session.lines(POSITIONS)
            for start in session.rooms:
                session.index.add_restored(start)
            session.attend(queries[:chosen], lines[:chosen])
            session.index.keep_restored(rooms - taken)

            assert torch.equal(run(session, is_held=True), expected)
            keys = session.buffers[0]
            in_first = keys[session.cache.start : session.rooms[0]].isfinite().all(dim=1)
            assert in_first.any() == (chosen > 0)
            assert keys[session.rooms[0] : session.rooms[0] + HKV * KEPT * (rooms - taken)].isfinite().all()
            assert torch.equal(session.attend(queries, lines), said)

            session.archived.halves[0].fill_(0)  # other codes would be other entries
            again = run(session, is_held=True)
            of_head = (again == expected).all(dim=-1).all(dim=0).sum(dim=1)
            assert (of_head >= KEPT * (rooms - taken) * 3 // 4).all() and (of_head < end - first).all()


@pytest.mark.parametrize("identity", [ProductIdentity.EXACT, ProductIdentity.QUANTISED])
def test_the_numbers_of_entries_are_their_deviations_times_the_matrix(identity: ProductIdentity) -> None:
    """Of two layers, read where they lie: keys are rotated back first."""
    first, count, outputs = 40, 70, 90
    draw = torch.Generator().manual_seed(1)
    unrotated, values = torch.randn(2, 2, HKV, count, D, generator=draw)
    matrices = torch.randn(2, HKV, 2 * D, outputs, generator=draw)
    means = torch.randn(2, HKV, 2 * D, generator=draw)
    both = torch.cat((unrotated, values), dim=-1) - means[:, :, None]
    expected = torch.einsum("lhnd,lhdc->nc", both, matrices)
    analyser = GroupAnalyser(
        layers=(3, 5), count=outputs, means=tuple(means), make_matrix=lambda index: matrices[index]
    )
    positions = torch.arange(first, first + count)
    regions = torch.full((2, 2, HKV, count + 5, D), torch.nan)
    for layer in range(2):
        regions[layer, 0, :, 2 : 2 + count] = rotate(unrotated[layer], positions)
        regions[layer, 1, :, 2 : 2 + count] = values[layer]
    layers = [
        ReadLayer(rotary="default", keys=own[0, :, 2 : 2 + count], values=own[1, :, 2 : 2 + count]) for own in regions
    ]
    with library().open_threads(2) as threads:
        coder = made_coder(threads, identity=identity, turn=lambda keys, shifts, _: rotate(keys, shifts))
        assert coder.analyses("default", D, count) and not coder.analyses("other", D, count)

        numbers, found = coder.analyse(analyser, layers, first)

        assert found.isfinite().all()
        lost = (numbers - expected).square().mean() / expected.square().mean()
        assert lost < (1e-3 if identity is ProductIdentity.QUANTISED else 1e-6)
        regions[1, 1, 0, 9, 3] = torch.inf
        assert coder.analyse(analyser, layers, first)[1].isfinite().tolist() == [[True, True], [True, False]]


def test_what_a_restore_cache_holds_changes_no_bit() -> None:
    """Neither its size, nor what was chosen before, nor threads and instructions."""
    decoder = make_decoder()
    first = Archived(decoder)
    queries = first.queries(len(POSITIONS))
    expected = first.attend(queries, first.lines(POSITIONS))

    for level in library().levels():
        for slots in (KEPT, KEPT + 7, GONE):
            session = Archived(decoder, slots=slots)
            for turn in (slice(None), slice(30, None), slice(0, 3), slice(None)):
                found = session.attend(queries[turn], session.lines(POSITIONS[turn]), level=level, threads=2)
                assert torch.equal(found, expected[turn]), (level, slots, turn)


def test_rooms_that_come_and_go_change_no_bit_and_are_left_alone_once_they_are_gone() -> None:
    first = Archived(make_decoder())
    queries = first.queries(len(POSITIONS))
    expected = first.attend(queries, first.lines(POSITIONS))
    session = Archived(make_decoder(), rooms=3)
    index, (keys, _) = session.index, session.buffers

    def attend(turn: slice) -> None:
        found = session.attend(queries[turn], session.lines(POSITIONS[turn]), threads=2)
        assert torch.equal(found, expected[turn])

    for start in session.rooms:
        index.add_restored(start)
        attend(slice(0, 20))
    for rooms in (2, 0):
        index.keep_restored(rooms)
        gone = keys[session.rooms[rooms] :]
        assert not gone.isnan().all()  # they had entries
        gone.fill_(torch.nan)  # what others write
        attend(slice(10, 40))
        assert gone.isnan().all()
    for start in reversed(session.rooms):  # elsewhere, before any token has noticed
        index.keep_restored(0)
        keys[session.rooms[0] :] = torch.nan
        index.add_restored(start)
        attend(slice(20, None))
    index.forget_restored()
    keys[session.cache.start : session.rooms[0]] = torch.nan
    attend(slice(None))


def test_a_token_that_was_chosen_before_is_not_restored_again() -> None:
    session = Archived(make_decoder(), rooms=7)  # for all that are archived
    for start in session.rooms:
        session.index.add_restored(start)
    queries, lines = session.queries(len(POSITIONS)), session.lines(POSITIONS)
    expected = session.attend(queries, lines)
    session.archived.halves[0].fill_(0)  # other codes would be other entries

    assert torch.equal(session.attend(queries, lines), expected)


def test_what_many_tokens_chose_stays_longer_than_what_was_chosen_last() -> None:
    session = Archived(make_decoder(), slots=KEPT * 2)
    queries = session.queries(len(POSITIONS))

    def choose(number: int) -> set[tuple[int, int]]:
        """The head and the position of every archived token that this query chooses."""
        own = Archived(make_decoder(), slots=KEPT)
        for each in (own, session):
            each.attend(queries[number : number + 1], each.lines(POSITIONS[number : number + 1]))
        return held(own)

    def held(of: Archived) -> set[tuple[int, int]]:
        tables = of.index._tables
        assert tables is not None
        return {(head, int(place) - 1) for head, own in enumerate(tables.held) for place in own if place}

    often = choose(0)
    for _ in range(7):
        assert choose(0) == often
    once = choose(10)
    later = choose(20) | choose(30)

    assert often <= held(session)
    assert once - often - later and not once - often - later <= held(session)


def test_an_entry_that_is_not_finite_is_noticed() -> None:
    decoder = make_decoder()
    decoder.means[1, 3] = torch.inf
    session = Archived(decoder)

    session.attend(session.queries(1), session.lines(POSITIONS[:1]))

    assert not session.index.restored_all_finite
