"""Weight-only quantisation: matrices as products read them, 8-bit floats with scales, or 4-bit codes in groups.

    format    number                 codes
    fp8       code · scale           float8_e4m3fn [O, K]
    int4      (code - zero) · scale  uint8 [O, groups · group / 2]: byte i of a group has input i in its low four bits,
                                     and input i + group / 2 in its high ones

A scale belongs to one output and one group of inputs; of `fp8` by channel, to all inputs. Inputs that fill up the last
group of `int4` are not read. Nothing else is quantised: products compute with activations as they are.

The two halves of a group lie in one byte so that a kernel unpacks them without moving a number to another thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 448.0  # of float8_e4m3fn
GROUP = 128  # inputs of a group of `int4`, when weights are quantised here
_MIDDLE = 8  # the code of zero where a matrix has no zeros of its own
_CODES = 16
_LEAST_SCALE = 2.0**-24  # of float16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantisedMatrix:
    """A matrix [O, K].

    scales: floating-point numbers [O, groups]. zeros: uint8 [O, groups], of `int4`; None: all are 8. group: inputs of a
    group; it is `inputs` where an output has one scale.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    inputs: int
    group: int

    def __post_init__(self) -> None:
        groups = -(-self.inputs // self.group)
        width = self.inputs if self.is_fp8 else groups * self.group // 2
        assert self.codes.shape == (len(self.scales), width), (self.codes.shape, self.inputs, self.group)
        assert self.scales.shape[1:] == (groups,), (self.scales.shape, groups)
        assert self.zeros is None or self.zeros.shape == self.scales.shape, self.zeros

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.inputs

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def is_fp8(self) -> bool:
        return self.codes.dtype == torch.float8_e4m3fn

    @property
    def has_groups(self) -> bool:
        return self.group != self.inputs

    @property
    def format(self) -> str:
        """Its name: `fp8` and `fp8/128`, by channel and in groups of inputs, or `int4/128`."""
        name = "fp8" if self.is_fp8 else "int4"
        return f"{name}/{self.group}" if self.has_groups or not self.is_fp8 else name

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scales, self.zeros) if part is not None)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The matrix [O, K]: computed in float32, and rounded once."""
        if self.is_fp8:
            codes = self.codes.float()
        else:
            halves = self.codes.view(len(self), -1, self.group // 2)
            codes = torch.cat((halves & 15, halves >> 4), dim=-1).float()
            codes -= _MIDDLE if self.zeros is None else self.zeros[:, :, None]
            codes = codes.view(len(self), -1)[:, : self.inputs]
        if not self.has_groups:
            return (codes * self.scales.float()).to(dtype)
        scales = self.scales.float().repeat_interleave(self.group, dim=1)[:, : self.inputs]
        return (codes * scales).to(dtype)

    def rows(self, first: int, count: int) -> QuantisedMatrix:
        """Some of the outputs: views."""
        return self._of([part[first : first + count] if part is not None else None for part in self._parts()])

    def columns(self, first: int, count: int) -> QuantisedMatrix:
        """Some of the inputs: whole groups, if there are."""
        if not self.has_groups:
            codes = self.codes[:, first : first + count].contiguous()
            return QuantisedMatrix(codes=codes, scales=self.scales, zeros=None, inputs=count, group=count)
        assert not first % self.group and not count % self.group, (first, count, self.group)
        width = 1 if self.is_fp8 else 2  # inputs of a byte
        codes, (scales, zeros) = self.codes[:, first // width : (first + count) // width], self._parts()[1:]
        groups = slice(first // self.group, (first + count) // self.group)
        return QuantisedMatrix(
            codes=codes.contiguous(),
            scales=scales[:, groups].contiguous(),
            zeros=None if zeros is None else zeros[:, groups].contiguous(),
            inputs=count,
            group=self.group,
        )

    def to(self, device: torch.device | str) -> QuantisedMatrix:
        return self._of([part.to(device) if part is not None else None for part in self._parts()])

    def _parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.codes, self.scales, self.zeros

    def _of(self, parts: Sequence[Tensor | None]) -> QuantisedMatrix:
        codes, scales, zeros = parts
        assert codes is not None
        assert scales is not None
        return QuantisedMatrix(codes=codes, scales=scales, zeros=zeros, inputs=self.inputs, group=self.group)


Matrix = Tensor | QuantisedMatrix


def joined(matrices: Sequence[QuantisedMatrix]) -> QuantisedMatrix | None:
    """The outputs of all, one below the other; None if they are not of one format."""
    first = matrices[0]
    alike = {(one.format, one.inputs, one.group, one.scales.dtype, one.zeros is None) for one in matrices}
    if len(alike) > 1:
        return None
    # torch has no cat of 8-bit floats on every device.
    codes = torch.cat([one.codes.view(torch.uint8) for one in matrices]).view(first.codes.dtype)
    zeros = None if first.zeros is None else torch.cat([one.zeros for one in matrices if one.zeros is not None])
    return QuantisedMatrix(
        codes=codes,
        scales=torch.cat([one.scales for one in matrices]),
        zeros=zeros,
        inputs=first.inputs,
        group=first.group,
    )


def pack_codes(codes: Tensor, group: int) -> Tensor:
    """Codes [O, K] of 4 bits, integers of any type, as uint8 [O, groups · group / 2]."""
    outputs, inputs = codes.shape
    filled = torch.nn.functional.pad(codes.to(torch.uint8), (0, -inputs % group))
    low, high = filled.view(outputs, -1, group).chunk(2, dim=-1)
    return (low | (high << 4)).reshape(outputs, -1).contiguous()


def largest_of(matrix: Tensor) -> Tensor:
    """The largest magnitude of each output: float32 [O]."""
    return matrix.float().abs().amax(dim=1)


def quantise(matrix: Tensor, format_name: str, largest: Tensor | None = None) -> QuantisedMatrix:
    """A matrix [O, K] of floating-point numbers in `fp8` by channel, or in `int4` in groups of 128.

    fp8: the largest number of an output becomes 448, and numbers are rounded to the nearest. int4: the least and the
    largest number of a group become the ends of the codes; zero is a code.

    largest: float32 [O], of `fp8`, of a matrix of which this is some columns; None: this one's.
    """
    outputs, inputs = matrix.shape
    wide = matrix.float()
    if format_name == "fp8":
        of_output = largest_of(matrix) if largest is None else largest
        scales = (of_output[:, None] / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        codes = (wide / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return QuantisedMatrix(codes=codes, scales=scales, zeros=None, inputs=inputs, group=inputs)
    assert format_name == "int4", format_name
    filled = torch.nn.functional.pad(wide, (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    low, high = filled.amin(dim=-1, keepdim=True).clamp_max(0.0), filled.amax(dim=-1, keepdim=True).clamp_min(0.0)
    scales = ((high - low) / (_CODES - 1)).clamp_min(_LEAST_SCALE).to(torch.float16)
    steps = scales.float()
    zeros = (-low / steps).round().clamp(0, _CODES - 1)
    codes = (filled / steps + zeros).round().clamp(0, _CODES - 1)
    return QuantisedMatrix(
        codes=pack_codes(codes.view(outputs, -1), GROUP),
        scales=scales[:, :, 0],
        zeros=zeros[:, :, 0].to(torch.uint8),
        inputs=inputs,
        group=GROUP,
    )
