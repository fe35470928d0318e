"""Cuts: which elements of an axis each rank holds, and how cuts pass reshapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ...records import dataclass

Indices = npt.NDArray[np.int64]
Runs = tuple[tuple[int, int], ...]  # indices as ranges [start, stop)


@dataclass(frozen=True, slots=True)
class Cut:
    """The elements of an axis that each rank holds, in their order. Ranks may hold the same elements.

    Args:
        axis: counted from the end, so that it is the same for operands of fewer dimensions.
        size: number of elements of the whole axis.
        parts: the elements of each rank, as ranges.
    """

    axis: int
    size: int
    parts: tuple[Runs, ...]

    def indices(self, rank: int) -> Indices:
        """Return the elements of a rank, in its order."""
        return np.concatenate([np.arange(*run) for run in self.parts[rank]])

    def local(self, rank: int) -> int:
        """Return the number of elements that a rank holds."""
        return sum(stop - start for start, stop in self.parts[rank])

    def moved(self, axis: int) -> Cut:
        """Return the same elements on another axis."""
        return Cut(axis, self.size, self.parts)

    def mapped(self, change: Callable[[Indices], Indices | None], axis: int, size: int) -> Cut | None:
        """Return a cut of another axis, whose elements ``change`` returns; None if it returns None."""
        changed = [change(self.indices(rank)) for rank in range(len(self.parts))]
        known = [part for part in changed if part is not None and part.size]
        return None if len(known) < len(self.parts) else Cut(axis, size, tuple(map(runs_of, known)))


def runs_of(indices: Indices) -> Runs:
    """Return indices as ranges."""
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(indices, breaks))


def even_cut(axis: int, size: int, count: int, quantum: int = 1) -> Cut | None:
    """Return a cut into ``count`` ranges of whole quanta, as equal as possible; None if there are fewer.

    Args:
        axis: counted from the end.
        size: elements of the axis; its last quantum may be short.
        count: number of ranks.
        quantum: elements that stay together.
    """
    quanta = -(-size // quantum)
    if quanta < count:
        return None
    ends = [min(size, quantum * (quanta * (rank + 1) // count)) for rank in range(count)]
    return Cut(axis, size, tuple(((start, end),) for start, end in zip([0, *ends], ends, strict=False)))


def repeated(cut: Cut, axis: int, times: int) -> Cut:
    """Return the cut of an axis that has ``times`` elements for each one of ``cut``."""
    parts = tuple(tuple((start * times, stop * times) for start, stop in runs) for runs in cut.parts)
    return Cut(axis, cut.size * times, tuple(map(_joined, parts)))


def grouped(cut: Cut, axis: int, times: int) -> Cut | None:
    """Return the cut of an axis that has one element for ``times`` of ``cut``; None if groups are cut."""
    if cut.size % times or any(bound % times for runs in cut.parts for run in runs for bound in run):
        return None
    parts = tuple(tuple((start // times, stop // times) for start, stop in runs) for runs in cut.parts)
    return Cut(axis, cut.size // times, parts)


def reshaped(cut: Cut, before: Sequence[int | None], after: Sequence[int | None]) -> Cut | None:
    """Return the cut behind a reshape; None if it is a cut of no axis there, or the sizes are unknown.

    Args:
        cut: of a tensor of the shape ``before``.
        before: sizes of the axes, None if they are not constant.
        after: likewise.
    """
    if len(before) < -cut.axis:
        return None
    inner = _product(before[len(before) + cut.axis + 1 :])
    if inner is None:
        return None
    whole = inner * cut.size
    for axis in range(-1, -len(after) - 1, -1):
        behind = _product(after[len(after) + axis + 1 :])
        size = after[axis]
        if behind is None or size is None:
            return None
        if behind * size != whole or (size == 1 and cut.size > 1):
            continue
        if behind <= inner and inner % behind == 0:
            return repeated(cut, axis, inner // behind)
        return grouped(cut, axis, behind // inner) if behind % inner == 0 else None
    return None


def _joined(runs: Runs) -> Runs:
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


def _product(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None
