"""Scales of blocks that are small multiples of one scale for a group of blocks.

ggml's K-quants store such scales (6 bits for each of 8 blocks, https://github.com/ggml-org/llama.cpp,
ggml/src/ggml-quants.c). Here they are ordinary float16 scales of DequantizeLinear, chosen so that in units
of the group's scale every weight is a signed byte: ``(level - zero point) * multiple``. Kernels then add the
integer products of a whole group before they scale them.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from ....errors import GraphError
from ...graph.lazy import Array
from .blockwise import BlockFormat, Floats, Quantized, Quantizer, choose_scales, levels_of
from .panels import Part, Rounding, for_each_part, panel_of, quotient, reciprocal
from .refine import block_systems, column_parts, fit_scales

_MOST = 15  # of the multiples
_LARGEST = 127  # magnitude of a weight in units of its group's scale
FACTORS = tuple(2.4 ** (step / 14) for step in range(15))  # of the smallest unit of a group: units tried
_UNIT_BITS = 7  # significant bits of a unit: with 4 of a multiple, products are exact in float16
_FLOAT16_STEP = 2.0**-24
_SWEEPS = 2  # of fitting multiples and units


class Scales(NamedTuple):
    """Scales and zero points [blocks, out]; with groups, the multiples of their units."""

    scales: Floats
    zero_points: Floats
    multiples: Floats | None = None


def grouped(quantizer: Quantizer) -> Quantizer:
    """Return a quantizer that gives the scales of another one common units, if the format asks for groups.

    The result raises ``GraphError`` for NaN, infinity, and weights whose squares exceed float32.
    """

    def quantize(weight: Floats, form: BlockFormat) -> Quantized:
        plain = quantizer(weight, dataclasses.replace(form, group_size=0))
        if not np.isfinite(plain.scales).all():
            raise GraphError("it holds weights that are too large to quantize")
        if not form.group_size or plain.zero_points is None:
            return plain
        free = Scales(plain.scales, plain.zero_points.astype(np.float32))
        found = share_units(weight, free, form)
        return levels_of(weight, form, found.scales, found.zero_points)

    return quantize


def starting_scales(weight: Floats, form: BlockFormat, importance: Floats) -> Scales:
    """Return ``choose_scales``, with common units if the format asks for groups."""
    free = Scales(*choose_scales(weight, form, importance))
    return share_units(weight, free, form, importance) if form.group_size else free


def refitted(
    slope: Floats, levels: Floats, block_scales: Scales, moments: Floats, form: BlockFormat
) -> Scales:
    """Return the scales with the least squared error of the products, given the levels.

    With groups, multiples and units are fitted in turn, each given all others.

    Args:
        slope: moments @ (the float matrix - the dequantized one), [in, out].
        levels: levels minus zero points, [in, out].
        block_scales: the current scales.
        moments: E[x x^T], [in, in].
        form: the format.
    """
    if block_scales.multiples is None:
        return block_scales._replace(scales=fit_scales(slope, levels, block_scales.scales, moments))
    scales, multiples = np.empty_like(block_scales.scales), np.empty_like(block_scales.scales)
    most = _most_multiples(block_scales.zero_points, form)
    per_group = form.group_size // form.block_size
    for columns in column_parts(*scales.shape):
        systems, slopes = block_systems(slope[:, columns], levels[:, columns], len(scales), moments)
        start = block_scales.scales[:, columns].T, block_scales.multiples[:, columns].T, most[:, columns].T
        fit = _GroupFit(systems, slopes, *start, per_group)
        for _ in range(_SWEEPS):
            fit.fit_multiples()
            fit.fit_units()
        scales[:, columns], multiples[:, columns] = fit.scales.T, fit.multiples.T
    return block_scales._replace(scales=scales, multiples=multiples)


class _GroupFit:
    """Some columns, [columns, blocks]: coordinate descent on multiples and units."""

    def __init__(
        self, systems: Array, slopes: Array, scales: Array, multiples: Array, most: Array, per_group: int
    ) -> None:
        self.scales, self.multiples = scales.astype(np.float64), multiples.astype(np.float64)
        self._systems, self._most, self._per_group = systems, most, per_group
        self._units = (self.scales / self.multiples)[:, ::per_group]
        self._slope = slopes

    def fit_multiples(self) -> None:
        """Move each multiple to its best value."""
        for block in range(self.scales.shape[1]):
            unit, curvature = self._units[:, block // self._per_group], self._systems[:, block, block]
            wanted = self.scales[:, block] + _ratio(self._slope[:, block], curvature)
            tried = np.rint(_ratio(wanted, unit))
            self.multiples[:, block] = np.clip(tried, 1, self._most[:, block])
            self._move(slice(block, block + 1), (self.multiples[:, block] * unit)[:, None])

    def fit_units(self) -> None:
        """Move each unit to its best value, rounded."""
        for group in range(self._units.shape[1]):
            blocks = slice(group * self._per_group, (group + 1) * self._per_group)
            multiples = self.multiples[:, blocks]
            curvature = np.einsum("ni,nij,nj->n", multiples, self._systems[:, blocks, blocks], multiples)
            wanted = self._units[:, group] + _ratio((multiples * self._slope[:, blocks]).sum(1), curvature)
            self._units[:, group] = np.where(wanted > 0, _rounded(wanted), self._units[:, group])
            self._move(blocks, multiples * self._units[:, group, None])

    def _move(self, blocks: slice, scales: Array) -> None:
        change = scales - self.scales[:, blocks]
        self.scales[:, blocks] = scales
        self._slope -= np.einsum("nij,nj->ni", self._systems[:, :, blocks], change)


def share_units(weight: Floats, free: Scales, form: BlockFormat, importance: Floats | None = None) -> Scales:
    """Return scales near the given ones, with common units: those with the least error of rounding.

    Args:
        weight: the matrix, [in, out].
        free: the best scales of single blocks.
        form: the format, with groups.
        importance: mean squares of the inputs, [in]; None for 1.
    """
    scales, zero_points, multiples = (np.empty_like(free.scales) for _ in range(3))
    weighing = None if importance is None else importance.reshape(-1, form.block_size, 1).astype(np.float32)

    def choose(part: Part) -> None:
        weights = None if weighing is None else weighing[part.blocks[0]]
        rounding = Rounding(panel_of(weight, part, form), form, weights)
        zero, near = free.zero_points[part.blocks][:, None], free.scales[part.blocks][:, None]
        scale, multiple = _share(rounding, near, zero, form)
        zero = _zero_points(rounding, scale, zero, multiple, form)
        scales[part.blocks], multiples[part.blocks] = scale[:, 0], multiple[:, 0]
        zero_points[part.blocks] = zero[:, 0]

    for_each_part(choose, weight, form)
    return Scales(scales, zero_points, multiples)


def _share(rounding: Rounding, free: Floats, zero_points: Floats, form: BlockFormat) -> tuple[Floats, Floats]:
    """Return scales with common units and their multiples, [blocks, 1, columns].

    Of several units, each fitted by least squares to the levels that it gives, the best is chosen.
    """
    free, most = np.maximum(free, 0), _most_multiples(zero_points, form)
    firsts = np.arange(0, len(free), form.group_size // form.block_size)
    smallest = np.maximum.reduceat(free / most, firsts)
    gain, units, multiples = np.full_like(smallest, -1), np.zeros_like(smallest), np.ones_like(free)
    for factor in FACTORS:
        tried = _spread(smallest * np.float32(factor), form, len(free))
        multiple, product, square = _nearest(rounding, free, tried, zero_points, most)
        product = np.add.reduceat(product * multiple, firsts)
        square = np.add.reduceat(square * multiple * multiple, firsts)
        fitted = _rounded(quotient(product, square))
        gained = fitted * (2 * product - fitted * square)
        better = (fitted > 0) & (gained > gain)
        gain, units = np.where(better, gained, gain), np.where(better, fitted, units)
        multiples = np.where(_spread(better, form, len(free)), multiple, multiples)
    return multiples * _spread(units, form, len(free)), multiples


def _nearest(
    rounding: Rounding, free: Floats, units: Floats, zero_points: Floats, most: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return the better of the multiples just below and above ``free``, and the products of their levels."""
    below = np.clip(np.floor(free * reciprocal(units)), 1, most)
    above = np.minimum(below + 1, most)
    product, square = rounding.products(below * units, zero_points)
    gain = product * quotient(product, square)
    above_product, above_square = rounding.products(above * units, zero_points)
    better = above_product * quotient(above_product, above_square) > gain
    product, square = np.where(better, above_product, product), np.where(better, above_square, square)
    return np.where(better, above, below), product, square


def _zero_points(
    rounding: Rounding, scales: Floats, zero_points: Floats, multiples: Floats, form: BlockFormat
) -> Floats:
    """Return the best zero points at most one away."""
    best, least = zero_points, np.full_like(scales, np.inf)
    for move in (0, -1, 1):
        tried = np.clip(zero_points + np.float32(move), form.low, form.high)
        product, square = rounding.products(scales, tried)
        error = scales * (scales * square - 2 * product)
        better = (error < least) & (multiples <= _most_multiples(tried, form))
        best, least = np.where(better, tried, best), np.where(better, error, least)
    return best


def _most_multiples(zero_points: Floats, form: BlockFormat) -> Floats:
    """Return the largest multiples with which all weights fit a byte."""
    farthest = np.maximum(zero_points, form.high - zero_points)
    result: Floats = np.minimum(_MOST, _LARGEST // farthest)
    return result


def _ratio(numerator: Array, denominator: Array) -> Array:
    """Return the quotient, 0 where the denominator is nearly 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 1e-30)


def _spread(of_groups: Array, form: BlockFormat, blocks: int) -> Array:
    """Return the value of the group of each block, [blocks, out]."""
    return np.repeat(of_groups, form.group_size // form.block_size, 0)[:blocks]


def _rounded(units: Array) -> Floats:
    """Return units whose products with multiples are exact in float16."""
    mantissas, exponents = np.frexp(units)
    short = np.ldexp(np.rint(np.ldexp(mantissas, _UNIT_BITS)), exponents - _UNIT_BITS)
    result: Floats = (np.rint(short / _FLOAT16_STEP) * _FLOAT16_STEP).astype(np.float32)
    return result
