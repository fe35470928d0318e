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

from ...graph.lazy import Array
from .blockwise import (
    BlockFormat,
    Floats,
    Quantized,
    Quantizer,
    choose_scales,
    for_each_panel,
    levels_of,
    panel_of,
    reciprocal,
)
from .refine import block_systems, column_parts, fit_scales

_MOST = 15  # of the multiples
_LARGEST = 127  # magnitude of a weight in units of its group's scale
_TOPS = tuple(4 + 0.3 * step for step in range(37))  # multiples tried for the largest scale of a group
_UNIT_BITS = 7  # significant bits of a unit: with 4 of a multiple, products are exact in float16
_FLOAT16_STEP = 2.0**-24
_SWEEPS = 2  # of fitting multiples and units


class Scales(NamedTuple):
    """Scales and zero points [blocks, out]; with groups, the multiples of their units."""

    scales: Floats
    zero_points: Floats
    multiples: Floats | None = None


def grouped(quantizer: Quantizer) -> Quantizer:
    """Return a quantizer that gives the scales of another one common units, if the format asks for groups."""

    def quantize(weight: Floats, form: BlockFormat) -> Quantized:
        plain = quantizer(weight, dataclasses.replace(form, group_size=0))
        if not form.group_size or plain.zero_points is None:
            return plain
        free = Scales(plain.scales, plain.zero_points.astype(np.float32))
        found = share_units(weight, free, form, np.ones(len(weight), np.float32))
        return levels_of(weight, form, found.scales, found.zero_points)

    return quantize


def starting_scales(weight: Floats, form: BlockFormat, importance: Floats) -> Scales:
    """Return ``choose_scales``, with common units if the format asks for groups."""
    free = Scales(*choose_scales(weight, form, importance))
    return share_units(weight, free, form, importance) if form.group_size else free


def refitted(target: Floats, levels: Floats, found: Scales, moments: Floats, form: BlockFormat) -> Scales:
    """Return the scales with the least squared error of the products, given the levels.

    With groups, multiples and units are fitted in turn, each given all others.

    Args:
        target: the float matrix, [in, out].
        levels: levels minus zero points, [in, out].
        found: the current scales.
        moments: E[x x^T], [in, in].
        form: the format.
    """
    if found.multiples is None:
        return found._replace(scales=fit_scales(target, levels, found.scales, moments))
    scales, multiples = np.empty_like(found.scales), np.empty_like(found.scales)
    most = _most_multiples(found.zero_points, form)
    per_group = form.group_size // form.block_size
    for columns in column_parts(*scales.shape):
        systems, aims = block_systems(target[:, columns], levels[:, columns], len(scales), moments)
        start = found.scales[:, columns].T, found.multiples[:, columns].T, most[:, columns].T
        fit = _GroupFit(systems, aims, *start, per_group)
        for _ in range(_SWEEPS):
            fit.fit_multiples()
            fit.fit_units()
        scales[:, columns], multiples[:, columns] = fit.scales.T, fit.multiples.T
    return found._replace(scales=scales, multiples=multiples)


class _GroupFit:
    """Some columns, [columns, blocks]: coordinate descent on multiples and units."""

    def __init__(
        self, systems: Array, aims: Array, scales: Array, multiples: Array, most: Array, per_group: int
    ) -> None:
        self.scales, self.multiples = scales.astype(np.float64), multiples.astype(np.float64)
        self._systems, self._most, self._per_group = systems, most, per_group
        self._units = (self.scales / self.multiples)[:, ::per_group]
        self._slope = aims - np.einsum("nij,nj->ni", systems, self.scales)

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
            own = self.multiples[:, blocks]
            curvature = np.einsum("ni,nij,nj->n", own, self._systems[:, blocks, blocks], own)
            wanted = self._units[:, group] + _ratio((own * self._slope[:, blocks]).sum(1), curvature)
            self._units[:, group] = np.where(wanted > 0, _rounded(wanted), self._units[:, group])
            self._move(blocks, own * self._units[:, group, None])

    def _move(self, blocks: slice, scales: Array) -> None:
        change = scales - self.scales[:, blocks]
        self.scales[:, blocks] = scales
        self._slope -= np.einsum("nij,nj->ni", self._systems[:, :, blocks], change)


def share_units(weight: Floats, free: Scales, form: BlockFormat, importance: Floats) -> Scales:
    """Return scales near the given ones, with common units: those with the least error of rounding.

    Args:
        weight: the matrix, [in, out].
        free: the best scales of single blocks.
        form: the format, with groups.
        importance: mean squares of the inputs, [in].
    """
    found = Scales(*(np.empty_like(free.scales) for _ in range(3)))
    weighing = importance.reshape(-1, form.block_size, 1).astype(np.float32)

    def choose(columns: slice) -> None:
        panel = Panel(panel_of(weight, columns, form), weighing, form)
        part = panel.share(free.scales[:, columns], free.zero_points[:, columns])
        for whole, piece in zip(found, part, strict=True):
            if whole is not None and piece is not None:
                whole[:, columns] = piece

    for_each_panel(choose, weight)
    return found


class Panel:
    """Some columns of a matrix, [blocks, block_size, columns]."""

    def __init__(self, values: Floats, weighing: Floats, form: BlockFormat) -> None:
        self.values = values
        self.weighing = weighing
        self.form = form

    def error(self, scales: Floats, zero_points: Floats, multiples: Floats) -> Floats:
        """Return the error of rounding of each block; infinity if a weight could exceed a byte."""
        form, scale, zero = self.form, scales[:, None], zero_points[:, None]
        off = np.clip(np.rint(self.values * reciprocal(scale)) + zero, form.low, form.high)
        off -= zero
        off *= scale
        off -= self.values
        error = np.einsum("bin,bin,bik->bn", off, off, self.weighing)
        fits = multiples <= _most_multiples(zero_points, form)
        return np.where(fits, error, np.inf)

    def share(self, free: Floats, zero_points: Floats) -> Scales:
        """Return scales with common units: of several units those whose nearest multiples cost least."""
        per_group = self.form.group_size // self.form.block_size
        free = np.maximum(free, 0)
        firsts = np.arange(0, len(free), per_group)
        largest = np.maximum.reduceat(free, firsts)
        most = _most_multiples(zero_points, self.form)
        best = np.full(largest.shape, np.inf, np.float32)
        scales, multiples = np.zeros_like(free), np.ones_like(free)
        for top in _TOPS:
            units = _spread(_rounded(largest / np.float32(top)), self.form, len(free))
            ratio = free * reciprocal(units)
            below, above = (np.clip(turn(ratio), 1, most) for turn in (np.floor, np.ceil))
            errors = [self.error(tried * units, zero_points, tried) for tried in (below, above)]
            tried = np.where(errors[0] <= errors[1], below, above)
            total = np.add.reduceat(np.minimum(*errors), firsts)
            better = _spread(total < best, self.form, len(free))
            best = np.minimum(best, total)
            scales, multiples = np.where(better, tried * units, scales), np.where(better, tried, multiples)
        return Scales(scales, self._zero_points(scales, zero_points, multiples), multiples)

    def _zero_points(self, scales: Floats, zero_points: Floats, multiples: Floats) -> Floats:
        """Return the best zero points at most one away."""
        best, least = zero_points, self.error(scales, zero_points, multiples)
        for move in (-1, 1):
            tried = np.clip(zero_points + np.float32(move), self.form.low, self.form.high)
            error = self.error(scales, tried, multiples)
            best, least = np.where(error < least, tried, best), np.minimum(error, least)
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
