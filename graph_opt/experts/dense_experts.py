"""Find experts that compute every token in two batched products: [experts, tokens, in] @ [experts, in, out].

transformers' gpt-oss is traced in this form; a token's weights of experts that it did not choose are 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..analysis.region import region
from ..graph.edit import nodes_of, sole_consumer, weight
from ..graph.lazy import Array, reshape, shape_of
from .expert_part import ExpertPart
from .expert_tensors import FloatExperts, split_experts
from .gated_activation import Rows, gated_activation
from .mixture import Activation
from .stacked_experts import MAX_BETWEEN, pairs_of
from .write_mixture import ExpertWeights


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of all tokens with the matrices of all experts, and the bias of each expert behind it."""

    x: ir.Value
    tensors: FloatExperts
    output: ir.Value


class DenseExperts(ExpertPart):
    """All experts: gate and up projections in the first product, down in the second."""

    activation = Activation()

    def __init__(self, gate_up: _Product, down: _Product) -> None:
        self._gate_up, self._down = gate_up, down
        self.reads, self.result = (gate_up.x,), down.output
        self.count, self._width, _ = gate_up.tensors.shape
        self._rows: Rows = (slice(0), slice(0))

    def refusal(self, boundary: Mapping[ir.Value, Array], inputs: Mapping[ir.Value, Array]) -> str | None:
        """Return why the nodes between the products compute no gated activation, None if they do."""
        between = region([*boundary, self._gate_up.output], self._down.x, max_nodes=MAX_BETWEEN)
        if isinstance(between, str):
            return between
        shape = (self.count, inputs[self._gate_up.x].shape[-2])

        def compute(hidden: Array) -> Array:
            made = between(*boundary.values(), hidden.reshape(*shape, self._width))
            return made.reshape(len(hidden), -1) if made.size else made

        found = gated_activation(compute, shape[0] * shape[1], self._width, between.numbers())
        if found is None:
            return between.failure or "its experts do not compute SiLU(gate) * up between their products"
        self.activation, self._rows = found
        return None

    def substitute(self, given: Mapping[ir.Value, Array], factors: Array) -> Array:
        """Return the result if expert i only multiplied its tokens by ``factors[i]``."""
        return np.asarray(given[self._gate_up.x] * factors[:, None, None])

    def weights(self, graph: ir.Graph, before: ir.Node) -> list[ExpertWeights]:
        """Return the experts' weights, sliced from the stacked weights."""
        return split_experts(self._gate_up.tensors, self._rows, self._down.tensors, graph, before)


def dense_experts(graph: ir.Graph) -> Iterator[DenseExperts]:
    """Yield the candidate experts of a graph."""
    products = {node: found for node in nodes_of(graph, "MatMul") if (found := _product(node)) is not None}
    for pair in pairs_of(products):
        yield DenseExperts(*pair)


def _product(node: ir.Node) -> _Product | None:
    x, stack = node.inputs
    tensor = weight(stack)
    if x is None or stack is None or tensor is None or len(tensor.shape) != 3:
        return None
    count, _, width = shape_of(tensor)
    product = node.outputs[0]
    added = sole_consumer(product)
    others = [] if added is None or added.op_type != "Add" or added.domain else added.inputs
    for value in others:
        bias = weight(value)
        if added is not None and bias is not None and shape_of(bias) == (count, 1, width):
            stacked = FloatExperts(str(stack.name), reshape(bias, (count, width)), tensor, transposed=True)
            return _Product(x, stacked, added.outputs[0])
    return _Product(x, FloatExperts(str(stack.name), None, tensor, transposed=True), product)
