"""Blockwise quantization: ``block_size`` inputs of a column share a scale and an optional zero point."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ....errors import GraphError, UsageError
from ....records import dataclass
from ...graph.lazy import Array
from .cores import on_all_cores
from .panels import Part, Rounding, for_each_part, panel_of, quotient, reciprocal, scales_by_panel

Floats = npt.NDArray[np.float32]
SHRINKS = {4: (1.0, 0.92), 8: (1.0,)}  # ranges tried, relative to the full range, by bits
FINE_SHRINKS = tuple(1.08 - 0.03 * step for step in range(14))  # slower, more accurate


BLOCK_SIZES = (16, 32, 64, 128, 256)  # supported by the targets' kernels
_DEQUANTIZED = 1 << 20  # values that one core dequantizes at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """The storage format of blocked weights.

    Args:
        bits: 4 or 8.
        block_size: number of consecutive inputs that share a scale: a power of two, 16 to 256.
        symmetric: signed values without zero point, else unsigned values with one.
        group_size: inputs whose blocks have multiples of one scale, see ``grouped.py``; 0 for free scales.

    Raises:
        UsageError: a value is not supported.
    """

    bits: int = 4
    block_size: int = 32
    symmetric: bool = True
    group_size: int = 0

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise UsageError(f"weights can be quantized to 4 or 8 bits, found {self.bits}")
        if self.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise UsageError(f"the block size must be one of {sizes}, found {self.block_size}")

    def fitted(self, inputs: int) -> BlockFormat | None:
        """Return the format with the largest block size, at most this one, that divides ``inputs``.

        Partial blocks are avoided because not all targets' kernels support them. None if no block size
        divides ``inputs``.
        """
        sizes = [size for size in BLOCK_SIZES if size <= self.block_size and inputs % size == 0]
        return dataclasses.replace(self, block_size=sizes[-1]) if sizes else None

    def wide(self) -> BlockFormat:
        """Return the format of layers of the same model that get 8 bits: blocks of 64 are fast."""
        return BlockFormat(bits=8, block_size=max(self.block_size, 64), symmetric=True)

    def facts(self) -> dict[str, int | bool]:
        """Return the fields, as a package records them."""
        return {
            name: value for name, value in dataclasses.asdict(self).items() if name != "group_size" or value
        }

    @property
    def dtype(self) -> ir.DataType:
        """The ONNX type of the stored values."""
        names = {(4, True): "INT4", (4, False): "UINT4", (8, True): "INT8", (8, False): "UINT8"}
        return ir.DataType[names[self.bits, self.symmetric]]

    @property
    def low(self) -> int:
        """The smallest stored value."""
        return -(1 << (self.bits - 1)) if self.symmetric else 0

    @property
    def high(self) -> int:
        """The largest stored value."""
        return self.low + (1 << self.bits) - 1


class Quantized(NamedTuple):
    """Values [in, out] as int8 or uint8; scales and zero points [in / block_size, out]."""

    values: Array
    scales: Floats
    zero_points: Array | None


Quantizer = Callable[[Floats, BlockFormat], Quantized]


def round_to_nearest(weight: Floats, form: BlockFormat) -> Quantized:
    """Quantize a matrix [in, out] in blocks along its first axis, minimising the squared error.

    The full range maps the largest weight of a block to an end of the range, as llama.cpp's Q4_0 does, so
    that all levels are used. Other ranges are also tried, each with the least-squares scale of its rounding.

    Raises:
        GraphError: the matrix holds NaN or infinity.
    """
    inputs, outputs = weight.shape
    blocks = inputs // form.block_size
    stored = np.int8 if form.symmetric else np.uint8
    values = np.empty_like(weight, stored, subok=False)  # in the order of ``weight``, row or column major
    scales = np.empty((blocks, outputs), np.float32)
    zero_points = None if form.symmetric else np.empty((blocks, outputs), stored)

    def quantize(part: Part) -> None:
        panel = panel_of(weight, part, form)
        rounding = Rounding(panel, form)
        scale, zero_point = _best(rounding, _candidates(panel, form, SHRINKS[form.bits]))
        values[part.weights] = _stored(rounding, scale, zero_point)
        scales[part.blocks] = scale[:, 0]
        if zero_points is not None:
            zero_points[part.blocks] = zero_point[:, 0]

    for_each_part(quantize, weight, form)
    return Quantized(values, scales, zero_points)


def choose_scales(weight: Floats, form: BlockFormat, importance: Floats) -> tuple[Floats, Floats]:
    """Choose scales and zero points that minimise the squared error weighted by the inputs' mean squares.

    Args:
        weight: the matrix [in, out].
        form: its storage format.
        importance: mean squares of the inputs, [in].

    Returns:
        Scales and zero points [in / block_size, out], both as floats.

    Raises:
        GraphError: the matrix holds NaN or infinity.
    """
    weighing = importance.reshape(-1, form.block_size, 1).astype(np.float32)
    return scales_by_panel(
        weight, form, lambda panel, part: least_squares(panel, form, weighing[part.blocks[0]])
    )


def full_range(panel: Floats, form: BlockFormat) -> tuple[Floats, Floats]:
    """Return the scales and zero points [blocks, 1, columns] of the full range of every block.

    Raises:
        GraphError: the matrix holds NaN or infinity.
    """
    return next(_candidates(panel, form, (1.0,)))


def least_squares(
    panel: Floats, form: BlockFormat, importance: Floats | None = None
) -> tuple[Floats, Floats]:
    """Return the scales and zero points [blocks, 1, columns] with the least squared error on a grid.

    Args:
        panel: [blocks, block_size, columns].
        form: its storage format.
        importance: weights of the inputs, [blocks, block_size, 1]; None for 1.

    Raises:
        GraphError: the matrix holds NaN or infinity.
    """
    return _best(Rounding(panel, form, importance), _candidates(panel, form, FINE_SHRINKS))


def levels_of(weight: Floats, form: BlockFormat, scales: Floats, zero_points: Floats) -> Quantized:
    """Round a matrix [in, out] to nearest with given scales and zero points [blocks, out]."""
    stored = np.int8 if form.symmetric else np.uint8
    values = np.empty_like(weight, stored, subok=False)

    def fill(part: Part) -> None:
        scale, zero_point = scales[part.blocks][:, None], zero_points[part.blocks][:, None]
        values[part.weights] = _stored(Rounding(panel_of(weight, part, form), form), scale, zero_point)

    for_each_part(fill, weight, form)
    return Quantized(values, scales, None if form.symmetric else zero_points.astype(stored))


def dequantize(quantized: Quantized, form: BlockFormat) -> Floats:
    """Return the dequantized matrix, float32 [in, out]."""
    values, scales, zero_points = quantized.values, quantized.scales[:, None], quantized.zero_points
    cut = values.reshape(-1, form.block_size, values.shape[1])
    result = np.empty(cut.shape, np.float32)
    offsets = None if zero_points is None else zero_points[:, None].astype(np.float32)

    def fill(blocks: slice) -> None:  # no array of the matrix's size but the result
        near = np.float32(0) if offsets is None else offsets[blocks]
        np.subtract(cut[blocks], near, out=result[blocks])
        result[blocks] *= scales[blocks]

    step = max(1, _DEQUANTIZED // max(1, result[:1].size))
    on_all_cores(fill, [slice(start, start + step) for start in range(0, len(cut), step)])
    return result.reshape(values.shape)


def _candidates(
    panel: Floats, form: BlockFormat, shrinks: Sequence[float]
) -> Iterator[tuple[Floats, Floats]]:
    """Yield scales and zero points [blocks, 1, columns] for each range."""
    top, bottom = panel.max(1, keepdims=True), panel.min(1, keepdims=True)
    if not (np.isfinite(top).all() and np.isfinite(bottom).all()):
        raise GraphError("it holds NaN or infinity")
    if form.symmetric:
        full = np.where(top > -bottom, top, bottom) / form.low
        for shrink in shrinks:
            yield full * np.float32(shrink), np.zeros_like(full)
        return
    top, bottom = np.maximum(top, 0), np.minimum(bottom, 0)
    middle, half = (top + bottom) / 2, (top - bottom) / 2
    for shrink in shrinks:
        scale = half * np.float32(2 * shrink / form.high)
        zero_point = np.rint((half * np.float32(shrink) - middle) * reciprocal(scale))
        yield scale, np.clip(zero_point, 0, form.high)


def _best(rounding: Rounding, candidates: Iterator[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Choose per block the candidate with the least squared error, and its least-squares scale.

    For levels q the best scale is <w, q> / <q, q>, which reduces the error |w|^2 by <w, q>^2 / <q, q>.
    """
    scale, zero_point = next(candidates)
    gain = np.full_like(scale, -1)
    for tried, offset in itertools.chain([(scale, zero_point)], candidates):
        product, square = rounding.products(tried, offset)
        fitted = quotient(product, square)
        better = (fitted != 0) & (fitted * product > gain)
        gain = np.where(better, fitted * product, gain)
        scale, zero_point = np.where(better, fitted, scale), np.where(better, offset, zero_point)
    return scale, zero_point


def _stored(rounding: Rounding, scale: Floats, zero_point: Floats) -> Floats:
    """Return the levels of a panel, [inputs, columns]."""
    levels = rounding.levels(scale, zero_point)
    levels += zero_point
    return levels.reshape(-1, levels.shape[2])
