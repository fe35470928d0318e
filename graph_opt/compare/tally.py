"""Accumulate the differences of one output of two graphs over several runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...records import dataclass
from ..graph.lazy import Array
from .bars import Bars, epsilon, is_float

Floats = npt.NDArray[np.float64]
KEYS = ", keys"  # suffix of the name of an output with the keys of maps
_WHOLE = -1  # the "axis" of the slice that is the whole tensor
_MAX_SLICES = 65536
_NOISES = 10  # the rounding error of another correct graph, as a multiple of one measured
_ROUNDINGS = 8
# Limit of the error allowed by measured noise of 8-bit activations, relative to the largest value.
MAX_ROUNDED = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputResult:
    """The verdict on an output.

    Attributes:
        kind: ``float``, ``exact`` (integers, booleans, strings) or ``logits``.
        max_abs: largest difference.
        max_rel: largest difference relative to the range of the reference's values, see ``Tally``.
        bar: limit of ``max_rel``, or for ``exact`` of ``mismatches / elements``.
        elements: number of compared elements.
        mismatches: number of different elements of an exact output.
        same_nan, same_infinite: number of elements that are NaN, or the same infinity, in both.
        constant: whether the reference was constant over several runs of the same shape.
        rounding: the largest relative error that was allowed because of the reference's measured rounding
            error.
        reason: why it fails; None if it passes.
        judged: whether it affects the verdict; int8 caches are only reported.
    """

    kind: str
    max_abs: float
    max_rel: float
    bar: float
    elements: int
    mismatches: int = 0
    same_nan: int = 0
    same_infinite: int = 0
    constant: bool = False
    rounding: float | None = None
    reason: str | None = None
    judged: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the result in JSON types."""
        return {**asdict(self), "passed": self.reason is None}


@dataclass(slots=True)
class _Slices:
    """The largest error of each slice along one axis, and the range of the reference's values."""

    error: Floats
    low: Floats
    high: Floats

    def widen(self, other: _Slices) -> None:
        np.maximum(self.error, other.error, out=self.error)
        np.minimum(self.low, other.low, out=self.low)
        np.maximum(self.high, other.high, out=self.high)

    @property
    def magnitude(self) -> Floats:
        return np.maximum(np.abs(self.low), np.abs(self.high))


@dataclass(slots=True)
class Tally:
    """Accumulates the errors of an output by slice.

    An error is relative to the range of the reference's values in its slice, for each slice along each axis
    of fixed size and for the whole tensor. So a column of small scores beside one of large coordinates is
    judged by its own range. Over several runs with one shape, the range is that of each element over the
    runs. So an output that depends little on the inputs is judged relative to this dependence.

    Args:
        by_slice: judge each slice along each axis, not only the whole tensor.
    """

    by_slice: bool = True
    elements: int = 0
    mismatches: int = 0
    same_nan: int = 0
    same_infinite: int = 0
    max_abs: float = 0.0
    problem: str | None = None
    kind: str = "float"
    epsilon: float = 0.0
    repeated: bool = False
    varies: bool = False
    candidate_varies: bool = False
    _slices: dict[int, _Slices] | None = None
    _first: dict[tuple[int, ...], tuple[Array, Array]] = field(default_factory=dict)
    _range: dict[tuple[int, ...], tuple[Floats, Floats]] = field(default_factory=dict)
    _repeated: set[tuple[int, ...]] = field(default_factory=set)

    def add(self, left: Array, right: Array) -> None:
        """Add the outputs of one run: ``left`` of the reference, ``right`` of the candidate."""
        self.elements += left.size
        if left.shape != right.shape:
            self.problem = self.problem or f"has shape {list(right.shape)} instead of {list(left.shape)}"
            return
        if is_float(left) != is_float(right) or (not is_float(left) and _kind(left) != _kind(right)):
            self.problem = self.problem or f"has type {right.dtype} instead of {left.dtype}"
            return
        self._note_variation(left, right)
        if is_float(left):
            self.epsilon = max(self.epsilon, epsilon(left), epsilon(right))
            self._add_floats(left.astype(np.float64), right.astype(np.float64))
        else:
            self._add_exact(left, right)

    def result(
        self, bars: Bars, noise: Tally | None = None, *, most: float = 0.0, magnitude: float = 0.0
    ) -> OutputResult:
        """Judge the accumulated errors.

        Args:
            bars: the tolerances.
            noise: the reference compared with itself after rounding its weights and inputs.
            most: limit of the error allowed by the noise, relative to the largest value; at least the bar.
            magnitude: of the numbers that every element is computed from, see ``output_magnitudes``.
        """
        bar = bars.max_mismatch if self.kind == "exact" else bars.relative(self.epsilon)
        worst, excess, rounding = self._worst(bar, noise, max(bar, most), magnitude)
        return OutputResult(
            kind=self.kind,
            max_abs=self.max_abs,
            max_rel=float(np.inf) if self.problem and not self.mismatches else worst,
            bar=bar,
            elements=self.elements,
            mismatches=self.mismatches,
            same_nan=self.same_nan,
            same_infinite=self.same_infinite,
            constant=self.repeated and not self.varies,
            rounding=rounding,
            reason=self._reason(bar, worst, excess),
        )

    def _reason(self, bar: float, worst: float, excess: bool) -> str | None:
        if self.problem is not None:
            return self.problem
        if self.varies and not self.candidate_varies:
            return "is constant, but the reference's depends on the inputs"
        if self.kind == "exact":
            share = self.mismatches / max(self.elements, 1)
            if share > bar:
                count = f"{self.mismatches} of {self.elements}"
                return f"differs in {count} elements, by {self.max_abs:.3g} at most (--max-mismatch)"
            return None
        return f"has relative error {worst:.2g}, above the limit {bar:g} (--max-error)" if excess else None

    def _add_exact(self, left: Array, right: Array) -> None:
        self.kind = "exact"
        differ = left != right
        self.mismatches += int(np.count_nonzero(differ))
        if left.dtype.kind in "iub" and self.mismatches:
            apart = np.abs(left.astype(np.float64) - right.astype(np.float64))
            self.max_abs = max(self.max_abs, float(apart.max()))

    def _add_floats(self, left: Floats, right: Floats) -> None:
        finite = np.isfinite(left) & np.isfinite(right)
        if not finite.all():
            self._add_special(left, right, finite)
        if not finite.any():
            return
        with np.errstate(invalid="ignore", over="ignore"):
            exact, error = np.where(finite, left, np.nan), np.where(finite, np.abs(left - right), 0.0)
        self.max_abs = max(self.max_abs, float(error.max()))
        self._widen_range(exact)
        groups = dict(self._cut(exact, error))
        if self._slices is None:
            self._slices = groups
            return
        for axis, slices in list(self._slices.items()):
            if axis in groups and groups[axis].error.shape == slices.error.shape:
                slices.widen(groups[axis])
            else:
                del self._slices[axis]

    def _add_special(self, left: Floats, right: Floats, finite: npt.NDArray[np.bool_]) -> None:
        nan, same_nan = np.isnan(left) | np.isnan(right), np.isnan(left) & np.isnan(right)
        infinite = ~finite & ~nan
        self.same_nan += int(same_nan.sum())
        self.same_infinite += int((infinite & (left == right)).sum())
        if (nan & ~same_nan).any():
            count = int((nan & ~same_nan).sum())
            self.problem = self.problem or f"is NaN in {count} elements of only one of the two"
        elif (infinite & (left != right)).any():
            count = int((infinite & (left != right)).sum())
            self.problem = self.problem or f"is infinite in {count} elements that differ in the other"

    def _cut(self, exact: Floats, error: Floats) -> Iterator[tuple[int, _Slices]]:
        axes = [_WHOLE]
        if self.by_slice and exact.ndim > 1:
            axes += [axis for axis, size in enumerate(exact.shape) if 1 < size <= _MAX_SLICES]
        elif self.by_slice and exact.ndim == 1 and exact.size > 1:
            axes.append(0)
        for axis in axes:
            others = _others(axis, exact.ndim)
            with np.errstate(invalid="ignore"):
                low = np.fmin.reduce(exact, axis=others)
                high = np.fmax.reduce(exact, axis=others)
                figures = (error.max(axis=others), low, high)
            yield axis, _Slices(*(np.atleast_1d(np.array(figure, np.float64)) for figure in figures))

    def _widen_range(self, exact: Floats) -> None:
        if exact.shape in self._range:
            self._repeated.add(exact.shape)
        low, high = self._range.get(exact.shape, (exact, exact))
        self._range[exact.shape] = (np.fmin(low, exact), np.fmax(high, exact))

    def _note_variation(self, left: Array, right: Array) -> None:
        """Record whether either side differs from its first run with this shape."""
        self.repeated |= left.shape in self._first
        first = self._first.setdefault(left.shape, (left, right))
        self.varies |= not _same(left, first[0])
        self.candidate_varies |= not _same(right, first[1])

    def _worst(
        self, bar: float, noise: Tally | None, most: float, computed: float
    ) -> tuple[float, bool, float | None]:
        """Return the largest relative error, whether one is above the limit, and one allowed as rounding."""
        if not self._slices or _WHOLE not in self._slices:
            return 0.0, False, None
        worst, above, rounding = 0.0, 0.0, None
        magnitude = float(self._slices[_WHOLE].magnitude[0])
        # A slice of a saturated output, as of a sigmoid, may hold nothing but rounding errors of the whole.
        floor = _ROUNDINGS * self.epsilon * magnitude
        for axis, slices in self._slices.items():
            scale = self._scale(axis, slices)
            scale = np.where(scale > 0, scale, magnitude)
            zero = np.where(slices.error > 0, np.inf, 0.0)
            relative = np.divide(slices.error, scale, where=scale > 0, out=zero)
            rounded = _ROUNDINGS * self.epsilon * np.maximum(slices.magnitude, computed)
            allowed = np.maximum(bar * scale, rounded)
            saturated = slices.magnitude <= floor
            allowed = np.where(saturated, np.maximum(floor, rounded), allowed)
            relative = np.where(saturated & (slices.error <= floor), 0.0, relative)
            if noise is not None:
                measured = noise.noise(axis, slices.error.shape)
                room = np.minimum(_NOISES * measured + self.epsilon * magnitude, most * magnitude)
                used = (slices.error > allowed) & (slices.error <= room)
                rounding = max([rounding or 0.0, *relative[used].tolist()]) if used.any() else rounding
                allowed = np.maximum(allowed, room)
            worst = max(worst, float(relative.max()))
            above = max([above, *relative[slices.error > allowed].tolist()])
        return above or worst, above > 0, rounding

    def noise(self, axis: int, shape: tuple[int, ...]) -> Floats:
        """Return the largest error of each slice along ``axis``, zeros if unknown."""
        slices = (self._slices or {}).get(axis)
        return slices.error if slices is not None and slices.error.shape == shape else np.zeros(shape)

    def _scale(self, axis: int, slices: _Slices) -> Floats:
        """Return the range of the reference in each slice; its magnitude if the range is 0."""
        ranges = slices.high - slices.low
        varied = np.zeros_like(ranges)
        for low, high in (self._range[shape] for shape in self._repeated):
            found = np.atleast_1d(np.fmax.reduce(high - low, axis=_others(axis, low.ndim)))
            if found.shape == varied.shape:
                varied = np.fmax(varied, found)
        ranges = np.where(varied > 0, varied, ranges)
        return np.nan_to_num(np.where(ranges > 0, ranges, slices.magnitude))


def _others(axis: int, rank: int) -> tuple[int, ...] | None:
    return None if axis == _WHOLE else tuple(other for other in range(rank) if other != axis)


def _same(left: Array, right: Array) -> bool:
    if is_float(left):
        return bool(np.array_equal(left.astype(np.float64), right.astype(np.float64), equal_nan=True))
    return bool(np.array_equal(left, right))


def _kind(array: Array) -> str:
    return "string" if array.dtype.kind in "OUS" else array.dtype.name
