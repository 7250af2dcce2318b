"""Pieces of host memory come to a GPU in order and whole, however far the host is ahead of it."""

from __future__ import annotations

import pytest
import torch

from inference_engine.kv.memory.events import event_now
from inference_engine.kv.memory.inbound import Inbound

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="copies on a stream of their own are a GPU's")


def test_each_piece_is_there_when_it_is_read_and_until_it_was() -> None:
    device = torch.device("cuda")
    inbound, work = Inbound(device), torch.randn(2048, 2048, device=device)
    sizes = [100, 100, 5000, 70_000, 300, 2**20, 2**20, 2**20, 17]
    sources = [
        [torch.full((size,), float(index)).pin_memory() for _ in range(1 + index % 3)]
        for index, size in enumerate(sizes)
    ]
    found = []
    inbound.start(sources[0])
    for following in (*sources[1:], None):
        for _ in range(20):
            work = (work @ work).clamp(-1, 1)  # the device falls behind
        piece = inbound.take()
        if following is not None:
            inbound.start(following)
        for _ in range(20):
            work = (work @ work).clamp(-1, 1)
        found.append(piece.clone())
    for index, (piece, size) in enumerate(zip(found, sizes, strict=True)):
        assert torch.equal(piece.cpu(), torch.full((1 + index % 3, size), float(index)))


def test_a_copy_waits_for_what_writes_its_source_and_a_forgotten_one_is_not_taken() -> None:
    device = torch.device("cuda")
    inbound, work = Inbound(device), torch.randn(2048, 2048, device=device)
    source = torch.zeros(2**20).pin_memory()
    for value in (1.0, 2.0):
        for _ in range(100):
            work = (work @ work).clamp(-1, 1)
        source.copy_(torch.full((2**20,), value, device=device), non_blocking=True)
        inbound.start([torch.zeros(2**21).pin_memory()])
        inbound.forget()
        inbound.start([source], event_now(device))
        assert torch.equal(inbound.take().cpu()[0], torch.full((2**20,), value))
