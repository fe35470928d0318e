"""Blockwise quantization: ``block_size`` inputs of a column share a scale and an optional zero point."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ....errors import GraphError, UsageError
from ...graph.lazy import Array

Floats = npt.NDArray[np.float32]
_SHARED_SIZE = 1 << 25  # elements; larger matrices, such as embeddings, are quantized by all cores
_PANEL_BYTES = 1 << 20  # size of a panel of columns, which fits in the L2 cache
_SHRINKS = {4: (1.0, 0.92), 8: (1.0,)}  # ranges tried, relative to the full range, by bits
_FINE_SHRINKS = tuple(1.08 - 0.03 * step for step in range(14))  # slower, more accurate


BLOCK_SIZES = (16, 32, 64, 128, 256)  # supported by the targets' kernels


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

    def quantize(columns: slice) -> None:
        panel = panel_of(weight, columns, form)
        scale, zero_point = _best(panel, form, list(_candidates(panel, form, _SHRINKS[form.bits])))
        values[:, columns] = _rounded(panel, scale, zero_point, form).reshape(inputs, -1)
        scales[:, columns] = scale[:, 0]
        if zero_points is not None:
            zero_points[:, columns] = zero_point[:, 0]

    for_each_panel(quantize, weight)
    return Quantized(values, scales, zero_points)


Choose = Callable[[Floats], tuple[Floats, Floats]]
"""Receives a panel [blocks, block_size, columns]; returns scales and zero points [blocks, 1, columns]."""


def scales_by_panel(weight: Floats, form: BlockFormat, choose: Choose) -> tuple[Floats, Floats]:
    """Return the scales and zero points [in / block_size, out] that ``choose`` finds, panel by panel."""
    shape = (len(weight) // form.block_size, weight.shape[1])
    scales, zero_points = np.empty(shape, np.float32), np.empty(shape, np.float32)

    def fill(columns: slice) -> None:
        scale, zero_point = choose(panel_of(weight, columns, form))
        scales[:, columns], zero_points[:, columns] = scale[:, 0], zero_point[:, 0]

    for_each_panel(fill, weight)
    return scales, zero_points


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
    return scales_by_panel(weight, form, lambda panel: least_squares(panel, form, weighing))


def for_each_panel(work: Callable[[slice], None], weight: Floats) -> None:
    """Call ``work`` with slices of columns that fit in the L2 cache, in parallel for a large matrix."""
    inputs, outputs = weight.shape
    width = max(16, _PANEL_BYTES // (4 * inputs))
    panels = [slice(start, start + width) for start in range(0, outputs, width)]
    if weight.size < _SHARED_SIZE:
        for columns in panels:
            work(columns)
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(work, panels):  # re-raises a panel's exception
            pass


def panel_of(weight: Floats, columns: slice, form: BlockFormat) -> Floats:
    """Return columns of the matrix as [blocks, block_size, columns]."""
    panel = np.ascontiguousarray(weight[:, columns], np.float32)
    return panel.reshape(len(weight) // form.block_size, form.block_size, -1)


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
    return _best(panel, form, list(_candidates(panel, form, _FINE_SHRINKS)), importance)


def levels_of(weight: Floats, form: BlockFormat, scales: Floats, zero_points: Floats) -> Quantized:
    """Round a matrix [in, out] to nearest with given scales and zero points [blocks, out]."""
    stored = np.int8 if form.symmetric else np.uint8
    values = np.empty_like(weight, stored, subok=False)

    def fill(columns: slice) -> None:
        scale, zero_point = scales[:, None, columns], zero_points[:, None, columns]
        panel = panel_of(weight, columns, form)
        values[:, columns] = _rounded(panel, scale, zero_point, form).reshape(len(weight), -1)

    for_each_panel(fill, weight)
    return Quantized(values, scales, None if form.symmetric else zero_points.astype(stored))


def dequantize(quantized: Quantized, form: BlockFormat) -> Floats:
    """Return the dequantized matrix, float32 [in, out]."""
    levels = quantized.values.astype(np.float32)
    if quantized.zero_points is not None:
        levels -= np.repeat(quantized.zero_points.astype(np.float32), form.block_size, 0)
    levels *= np.repeat(quantized.scales, form.block_size, 0)
    return levels


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


def _best(
    panel: Floats,
    form: BlockFormat,
    candidates: Sequence[tuple[Floats, Floats]],
    importance: Floats | None = None,
) -> tuple[Floats, Floats]:
    """Choose per block the candidate with the least squared error, and its least-squares scale.

    For levels q the best scale is <w, q> / <q, q>, which reduces the error |w|^2 by <w, q>^2 / <q, q>.
    ``importance`` [blocks, block_size, 1] weights the inputs in these products.
    """
    scale, zero_point = (part.copy() for part in candidates[0])
    gain = np.full_like(scale, -1)
    for tried, offset in candidates:
        levels = _rounded(panel, tried, offset, form)
        if not form.symmetric:
            levels -= offset
        weighted = levels if importance is None else levels * importance
        product = np.einsum("bin,bin->bn", panel, weighted)[:, None]
        fitted = product * reciprocal(np.einsum("bin,bin->bn", levels, weighted)[:, None])
        better = (fitted != 0) & (fitted * product > gain)
        np.copyto(gain, fitted * product, where=better)
        np.copyto(scale, fitted, where=better)
        np.copyto(zero_point, offset, where=better)
    return scale, zero_point


def _rounded(panel: Floats, scale: Floats, zero_point: Floats, form: BlockFormat) -> Floats:
    result = panel * reciprocal(scale)
    np.rint(result, out=result)
    if not form.symmetric:
        result += zero_point
    return np.clip(result, form.low, form.high, out=result)


def reciprocal(values: Floats) -> Floats:
    """Return 1 / values, and 0 for 0."""
    result: Floats = np.divide(1, values, out=np.zeros_like(values), where=values != 0)
    return result
