"""Concrete sizes of a graph's dynamic axes, with which its shapes are computed.

The sizes are odd and unrelated, so that two different expressions do not agree on all sets. The first set is
the smallest: every axis is 1, and the past is 0. The last set is larger than every constant that the graph
may compare sizes with: a graph that keeps the last 4095 tokens behaves differently only beyond 4095.
"""

from __future__ import annotations

import dataclasses
from enum import Enum

import numpy as np
import onnx_ir as ir

from ...contract import INPUT_IDS
from ...records import dataclass
from ..graph.edit import static_size
from ..graph.lazy import bits_of
from .constant_evaluation import MAX_CONTENT

_UNBOUNDED = 1 << 24  # larger constants mean "no bound"
_MIN_BITS = 8
_CACHE_RANK = 4
_STEP = 24  # sizes are multiples of it, and of these remainders
_REMAINDERS = (1, 0, -1, 14)
_SPARE = 8  # multiples more than there are axes
_CLOSE_STEP, _CLOSE_REMAINDERS, _CLOSE_SPARE = 12, (1, 0, -1, 2), 2  # the same, for short tables
_PICTURE = 61  # the least size of an axis of a picture
_CLOSE = 53  # cached tokens
_FAR = (3, 5)  # times the largest number, on top of the last probe's new and past tokens


@dataclass(frozen=True, slots=True)
class ProbeSizes:
    """One set of concrete sizes."""

    batch: int
    sequence: int
    past: int

    @property
    def total(self) -> int:
        """Cached and new tokens."""
        return self.past + self.sequence

    def named(self) -> dict[str, int]:
        """Return the sizes by the contract's axis names."""
        return {"batch": self.batch, "sequence": self.sequence, "total": self.total, "past": self.past}


PROBES = (ProbeSizes(1, 1, 0), ProbeSizes(2, 3, 5), ProbeSizes(3, 7, 1009), ProbeSizes(7, 61, 29))


class Reach(Enum):
    """How large the sizes are, in the order in which they are tried."""

    BEYOND = "the last set is larger than every constant in the graph"
    USUAL = "up to about 1000 tokens"
    CLOSE = "less than 100 tokens, 40 of graphs with two axes, for graphs with short tables"
    LARGE = "at least 61, for graphs that downsample images; not for decoders"


def decoder_sizes(graph: ir.Graph, reach: Reach) -> tuple[ProbeSizes, ...]:
    """Return the sizes to try on a decoder; the past is 0 without caches, and fixed sizes are kept."""
    ids = next(value for value in graph.inputs if value.name == INPUT_IDS)
    cached = any(value.shape is not None and len(value.shape) == _CACHE_RANK for value in graph.inputs)
    batch, new = static_size(ids, 0), static_size(ids, 1)
    largest = _largest_number(graph) if reach is Reach.BEYOND else 0
    most = _CLOSE if reach is Reach.CLOSE else PROBES[-2].past
    last = PROBES[-1]
    beyond = ProbeSizes(last.batch, last.sequence + _FAR[0] * largest, last.past + _FAR[1] * largest)
    return tuple(
        ProbeSizes(batch or probe.batch, new or probe.sequence, probe.past if cached else 0)
        for probe in (*PROBES[:-2], dataclasses.replace(PROBES[-2], past=most), beyond)
    )


def axis_name(value: ir.Value, axis: int) -> str:
    """Return the name of an input's axis, or ``value.axis`` if it has none."""
    dim = value.shape[axis] if value.shape is not None else None
    named = None if dim is None or isinstance(dim, int) else dim.value
    return str(named) if named else f"{value.name}.{axis}"


def sizes_of_names(graph: ir.Graph, reach: Reach) -> list[dict[str, int]]:
    """Return four sets of sizes of the dynamic axes of a graph's inputs, by ``axis_name``.

    All are 1 in the first set, and differ in the others. Divided by 2, 3 or 4, each leaves every remainder
    in some set, so that lengths rounded up and down are told apart.
    """
    names = list(
        dict.fromkeys(
            axis_name(value, axis)
            for value in graph.inputs
            for axis, dim in enumerate(value.shape or ())
            if not isinstance(dim, int)
        )
    )
    rng = np.random.default_rng(0)
    close = reach is Reach.CLOSE
    step, remainders = (_CLOSE_STEP, _CLOSE_REMAINDERS) if close else (_STEP, _REMAINDERS)
    first = _PICTURE if reach is Reach.LARGE else 1
    multiples = step * np.arange(
        -(-first // step) + (not close), len(names) + (_CLOSE_SPARE if close else _SPARE)
    )
    rows = np.array([rng.permutation(multiples)[: len(names)] + rest for rest in remainders])
    if reach is Reach.LARGE:
        return [dict(zip(names, row, strict=True)) for row in rows.tolist()]
    largest = _largest_number(graph) if reach is Reach.BEYOND else 0
    rows[-1] += -(-largest // _STEP) * _STEP * np.arange(1, len(names) + 1)
    return [dict(zip(names, row, strict=True)) for row in ([1] * len(names), *rows[1:].tolist())]


def _largest_number(graph: ir.Graph) -> int:
    """Return the largest integer among a graph's small constants, "no bound" constants excluded."""
    largest = 0
    for value in graph.initializers.values():
        tensor = value.const_value
        whole = tensor is not None and (tensor.dtype.is_integer() or tensor.size == 1)
        if tensor is None or not whole or tensor.size > MAX_CONTENT or bits_of(tensor.dtype) < _MIN_BITS:
            continue
        numbers = np.abs(tensor.numpy().astype(np.float64))
        largest = max(largest, int(np.max(numbers, initial=0, where=numbers < _UNBOUNDED)))
    return largest
