"""A shortlist on a processor that adds products in pairs of 16 bits: a program, for oneDNN asks once which one it has.

All numbers are as large as they get, and what is rounded is whole already.
"""

from __future__ import annotations

import torch

from kv_cache_proposer.dflash.shortlist import SHORTLIST, Shortlist


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = (torch.randint(64, 128, (500, 64), generator=generator) / 127) * (torch.arange(64) % 8 - 0.5).sign()
    vectors[:, 0] = -1
    states = torch.cat([torch.ones(1, 64), vectors[:1].sign(), torch.randn(5, 64, generator=generator).sign()])
    exact = states @ vectors.T
    chosen = exact.gather(-1, Shortlist(vectors)(states)).sort(descending=True).values
    assert torch.allclose(chosen, exact.topk(SHORTLIST).values, atol=1e-4, rtol=0)


if __name__ == "__main__":
    main()
