"""Which weights a quantization left in float, how large they are, and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from ..graph import graph_facts
from ..graph.lazy import shape_of
from ..passes.base import Refusal

MUCH = 0.1  # of the weights' bytes, from which on a warning is due
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


@dataclass(frozen=True, slots=True)
class LeftFloat:
    """Weight matrices that stayed float.

    Attributes:
        weights: how many.
        total: how many weight matrices there were.
        bytes: their size.
        share: that size as a share of all weight matrices before.
        reasons: what kept passes from quantizing weights, with how many weights each.
    """

    weights: int
    total: int
    bytes: int
    share: float
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def much(self) -> bool:
        """Whether so much is left that the model is not what its format's name says."""
        return self.share > MUCH

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON takes them."""
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
        return f"{size}: {reasons or 'as the recipe says'}"


def float_matrices(model: ir.Model) -> dict[str, int]:
    """Return the bytes of each float weight that has at least two dimensions, by name."""
    return {
        str(tensor.name): tensor.nbytes
        for tensor in graph_facts.initializers(model)
        if tensor.dtype in _FLOATS and sum(size > 1 for size in shape_of(tensor)) > 1
    }


def left_float(before: dict[str, int], after: ir.Model, refusals: Sequence[Refusal]) -> LeftFloat:
    """Compare a model's float matrices with those before quantization.

    Args:
        before: ``float_matrices`` of the model before.
        after: the quantized model; what quantization added, such as scales, does not count.
        refusals: of the passes that quantized it.
    """
    kept = {name: size for name, size in float_matrices(after).items() if before.get(name) == size}
    reasons = Counter(reason for refusal in refusals if (reason := _without_name(refusal.reason)) is not None)
    return LeftFloat(
        len(kept),
        len(before),
        sum(kept.values()),
        math.fsum(kept.values()) / max(1, sum(before.values())),
        dict(reasons),
    )


def _without_name(reason: str) -> str | None:
    """``weight NAME has 24 inputs`` -> ``has 24 inputs``, so that equal reasons count together."""
    first, _, rest = reason.partition(" ")
    return rest.partition(" ")[2] if first == "weight" else None
