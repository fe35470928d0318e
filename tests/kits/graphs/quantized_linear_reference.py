"""QuantizedLinear in NumPy: the arithmetic of ``providers/native/sources/products.h``, one row at a time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from carryall.graph_opt.lower.products.groups import GroupedScales
from carryall.graph_opt.lower.products.tiles import MINIMA, ZERO_POINTS, pack_tiles

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
TINY = np.float32(1e-35)
SHARED = 64  # inputs that share a scale, with 4 bits and if their blocks are not larger


@dataclass(frozen=True)
class Weight:
    """A random weight: unsigned values [outputs, blocks, block], and factors [outputs, blocks].

    With ``groups`` the scales are the multiples of theirs.
    """

    inputs: int
    bits: int
    values: Bytes
    scales: Floats
    zero_points: Bytes | None
    minima: Floats | None
    groups: GroupedScales | None = None

    @property
    def group_size(self) -> int:
        """The attribute ``group_size``."""
        return 0 if self.groups is None else self.groups.group_size

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return len(self.values)

    @property
    def block(self) -> int:
        """The block size."""
        return int(self.values.shape[2])

    @property
    def offsets(self) -> int:
        """The attribute ``offsets``."""
        return MINIMA if self.minima is not None else ZERO_POINTS if self.zero_points is not None else 0

    @property
    def zeros(self) -> npt.NDArray[np.int64]:
        """What the values are relative to, [outputs, blocks]."""
        if self.zero_points is not None:
            return self.zero_points.astype(np.int64)
        middle = 0 if self.minima is not None else 1 << (self.bits - 1)
        return np.full(self.scales.shape, middle, np.int64)

    def tiles(self) -> Bytes:
        """The weight in the layout of the kernels."""
        values = self.values
        if self.bits == 4:
            values = values[..., 0::2] | (values[..., 1::2] << np.uint8(4))
        return pack_tiles(
            values, self.scales, self.zero_points, self.minima, bits=self.bits, groups=self.groups
        )

    def floats(self) -> npt.NDArray[np.float64]:
        """The weight that it stands for, [outputs, inputs]."""
        dense: npt.NDArray[np.float64] = (self.values - self.zeros[..., None]) * np.float64(
            self.scales[..., None]
        )
        if self.minima is not None:
            dense = dense + self.minima[..., None]
        return dense.reshape(self.outputs, -1)[:, : self.inputs]


def random_weight(
    rng: np.random.Generator, outputs: int, inputs: int, bits: int, block: int, offsets: int
) -> Weight:
    """Return a weight whose padding holds values that must have no effect."""
    shape = (outputs, -(-inputs // block))
    values = rng.integers(0, 1 << bits, (*shape, block), np.uint8)
    scales = rng.uniform(0.01, 1, shape).astype(np.float32)
    points = rng.integers(0, 1 << bits, shape, np.uint8) if offsets == ZERO_POINTS else None
    minima = rng.standard_normal(shape).astype(np.float32) if offsets == MINIMA else None
    return Weight(inputs, bits, values, scales, points, minima)


def grouped_weight(
    rng: np.random.Generator, outputs: int, inputs: int, block: int, group: int, offsets: int
) -> Weight:
    """Return a weight of 4 bits whose scales are multiples of those of groups."""
    plain = random_weight(rng, outputs, inputs, 4, block, offsets)
    blocks = plain.scales.shape[1]
    scales = rng.uniform(0.01, 1, (outputs, -(-blocks * block // group))).astype(np.float32)
    farthest = np.maximum(plain.zeros, 15 - plain.zeros)
    multiples = rng.integers(0, 127 // farthest + 1).clip(0, 15).astype(np.uint8)
    own = np.repeat(scales, group // block, 1)[:, :blocks] * multiples
    return dataclasses.replace(plain, scales=own, groups=GroupedScales(scales, multiples, group))


def quantized_linear(x: Floats, weight: Weight, bias: Floats | None) -> Floats:
    """Return x [rows, inputs] @ W + bias [rows, outputs]: blocks in order, fused multiply-adds.

    Blocks of 4 bits share scales of their group, or of 64 inputs, and are added before they are multiplied.
    """
    blocks, block, share = weight.scales.shape[1], weight.block, 1
    if weight.bits == 4:
        share = max(1, (weight.group_size or SHARED) // block)
    padded = np.pad(x, ((0, 0), (0, blocks * block - x.shape[1])))
    centred = weight.values.astype(np.int64) - weight.zeros[..., None]
    result = np.zeros((len(x), weight.outputs), np.float32)
    result += 0 if bias is None else bias
    for first in range(0, blocks, share):
        scales, values = rounded(padded[:, first * block : (first + share) * block])
        added = np.zeros_like(result)
        for b, inputs in enumerate(np.split(values, values.shape[1] // block, axis=1), first):
            products = (inputs @ centred[:, b].T).astype(np.float32)
            factors = weight.scales if weight.groups is None else weight.groups.multiples
            added = _fused(products, factors[None, :, b], added)
            if weight.minima is not None:
                totals = inputs.sum(1).astype(np.float32)
                added = _fused(weight.minima[None, :, b], totals[:, None], added)
        if weight.groups is not None:
            added = added * weight.groups.scales[None, :, first // share]
        result = _fused(added, scales[:, None], result)
    return result


def rounded(x: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return a scale for each row, and the values rounded with it."""
    largest = np.abs(x).max(1)
    finite = np.isfinite(largest)
    with np.errstate(all="ignore"):
        scales = np.where(largest < TINY, np.float32(0), largest / np.float32(127)).astype(np.float32)
        inverse = np.where(largest < TINY, np.float32(0), np.float32(127) / largest).astype(np.float32)
        scaled = np.where(finite[:, None], x * inverse[:, None], 0)
    scales[~finite] = np.nan
    return scales, np.rint(scaled).astype(np.int64)


def _fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """Return a * b + c, rounded once but for rare double rounding: float64 holds the product exactly."""
    return (a.astype(np.float64) * b + c).astype(np.float32)
