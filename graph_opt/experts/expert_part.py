"""What the proof of a mixture of experts asks of candidate experts.

The proof (``fuse_experts.py``) replaces each expert by a multiplication with a factor, and compares the
results.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping

import onnx_ir as ir

from ..graph.lazy import Array
from .mixture import Activation
from .write_mixture import ExpertWeights


class ExpertPart(abc.ABC):
    """One or more experts with one result.

    Attributes:
        reads: the values that the experts read.
        result: the value that they compute.
        count: number of experts.
        activation: the function between the products.
    """

    reads: tuple[ir.Value, ...]
    result: ir.Value
    count: int
    activation: Activation

    @abc.abstractmethod
    def substitute(self, given: Mapping[ir.Value, Array], factors: Array) -> Array:
        """Return the result if expert i only multiplied its tokens by ``factors[i]``."""

    @abc.abstractmethod
    def weights(self, graph: ir.Graph, before: ir.Node) -> list[ExpertWeights]:
        """Return the experts' weights; new nodes are inserted in front of ``before``."""

    def refusal(self, boundary: Mapping[ir.Value, Array], given: Mapping[ir.Value, Array]) -> str | None:
        """Return why the candidate is not a set of gated MLPs, None if it is.

        Args:
            boundary: random tokens and scores.
            given: the values of ``reads`` for these.
        """
        return None
