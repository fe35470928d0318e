"""Find candidate experts in a traced graph."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ..graph.edit import nodes_of
from ..graph.lazy import Array
from .dense_experts import dense_experts
from .expert_part import ExpertPart
from .mixture import Expert, gated_mlp
from .stacked_experts import stacked_experts
from .write_mixture import ExpertWeights


class SingleExpert(ExpertPart):
    """One gated MLP."""

    count = 1

    def __init__(self, expert: Expert) -> None:
        self._expert = expert
        self.reads, self.result = (expert.gate.x,), expert.down.output
        self.activation = expert.activation

    def substitute(self, given: Mapping[ir.Value, Array], factors: Array) -> Array:
        """Return the result if the expert only multiplied its tokens by its factor."""
        return np.asarray(given[self.reads[0]] * factors[0])

    def weights(self, graph: ir.Graph, before: ir.Node) -> list[ExpertWeights]:
        """Return the expert's weights."""
        gate, up, down = ((layer.weight, layer.bias) for layer in self._expert.layers)
        return [ExpertWeights(gate, up, down)]


def expert_parts(graph: ir.Graph) -> dict[ir.Value, ExpertPart]:
    """Return the candidate experts of a graph, by their result."""
    mlps = (gated_mlp(node) for node in nodes_of(graph, "Sigmoid"))
    parts: list[ExpertPart] = [SingleExpert(mlp) for mlp in mlps if mlp is not None]
    return {part.result: part for part in (*parts, *stacked_experts(graph), *dense_experts(graph))}
