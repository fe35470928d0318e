"""Report which weights a quantization left in float, their size, and the reasons."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import field
from typing import Any

import onnx_ir as ir

from ...records import dataclass
from ..graph import graph_facts
from ..graph.lazy import shape_of
from ..passes.base import Refusal

MUCH = 0.1  # share of the weights' bytes above which the caller warns
_STACKED = "has three axes, as stacked experts; `carryall optimize` splits those that it knows"
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


@dataclass(frozen=True, slots=True)
class LeftFloat:
    """Weight matrices that stayed float.

    Attributes:
        weights: number of weight matrices that stayed float.
        total: number of weight matrices of the original model.
        bytes: size of those that stayed float.
        share: ``bytes`` relative to the size of all weight matrices of the original model.
        reasons: why weights were not quantized, with the number of weights for each reason.
    """

    weights: int
    total: int
    bytes: int
    share: float
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def much(self) -> bool:
        """Whether more than 10 % of the bytes stayed float."""
        return self.share > MUCH

    def to_dict(self) -> dict[str, Any]:
        """Return the facts in JSON types."""
        return {
            "weights": self.weights,
            "of": self.total,
            "bytes": self.bytes,
            "share": round(self.share, 4),
            "reasons": self.reasons,
        }

    def __str__(self) -> str:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in self.reasons.items())
        size = f"{self.weights} of {self.total} weights stay float, {100 * self.share:.1f} % of the bytes"
        return f"{size}: {reasons or 'as the recipe requests'}"


def float_matrices(model: ir.Model) -> dict[str, int]:
    """Return the bytes of each float weight with at least two axes larger than 1, by name."""
    return {
        str(tensor.name): tensor.nbytes
        for tensor in graph_facts.initializers(model)
        if tensor.dtype in _FLOATS and sum(size > 1 for size in shape_of(tensor)) > 1
    }


def left_float(before: dict[str, int], after: ir.Model, refusals: Sequence[Refusal]) -> LeftFloat:
    """Compare a model's float matrices with those before quantization.

    Args:
        before: ``float_matrices`` of the original model.
        after: the quantized model; tensors that quantization added, such as scales, are not counted.
        refusals: the refusals of the quantization passes.
    """
    kept = {name: size for name, size in float_matrices(after).items() if before.get(name) == size}
    reasons = Counter(reason for refusal in refusals if (reason := _without_name(refusal.reason)) is not None)
    stacks = sum(str(value.name) in kept and _is_stack(value) for value in after.graph.initializers.values())
    reasons.update({_STACKED: stacks} if stacks else {})
    return LeftFloat(
        len(kept),
        len(before),
        sum(kept.values()),
        math.fsum(kept.values()) / max(1, sum(before.values())),
        dict(reasons),
    )


def _is_stack(value: ir.Value) -> bool:
    """Return whether products read a weight of three axes: all of it, or matrices of chosen experts."""
    readers = {use.node.op_type for use in value.uses()}
    return (
        value.shape is not None and len(value.shape) == 3 and bool(readers & {"MatMul", "Gather", "GatherND"})
    )


def _without_name(reason: str) -> str | None:
    """Return ``has 24 inputs`` for ``weight NAME has 24 inputs``, so that equal reasons are grouped."""
    first, _, rest = reason.partition(" ")
    return rest.partition(" ")[2] if first == "weight" else None
