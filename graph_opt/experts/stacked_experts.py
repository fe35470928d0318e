"""Find experts whose weights are stacked, and gathered for each token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from ..analysis.region import region
from ..graph.edit import int_attribute, nodes_of, weight
from ..graph.lazy import Array
from .expert_part import ExpertPart
from .expert_tensors import FloatExperts, split_experts
from .gated_activation import Rows, gated_activation
from .mixture import Activation
from .write_mixture import ExpertWeights

MAX_BETWEEN = 64  # nodes between the two products of stacked experts
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _StackedProduct:
    """A batched product of each row with its expert's matrix, gathered by ``ids`` from [experts, ., .]."""

    node: ir.Node
    x: ir.Value
    ids: ir.Value
    stack: ir.Value
    transposed: bool  # the stacked weight is [experts, in, out]

    @property
    def tensors(self) -> FloatExperts:
        tensor = weight(self.stack)
        if tensor is None:
            raise AssertionError("unreachable: it was checked to be a weight")
        return FloatExperts(str(self.stack.name), None, tensor, self.transposed)


class StackedExperts(ExpertPart):
    """All experts in two batched products: gate and up projections in the first, down in the second.

    transformers' ``batched_mm`` computes experts this way (integrations/moe.py).
    """

    activation = Activation()

    def __init__(self, gate_up: _StackedProduct, down: _StackedProduct) -> None:
        self._gate_up, self._down = gate_up, down
        self.reads, self.result = (gate_up.x, gate_up.ids, down.ids), down.node.outputs[0]
        self.count, self._width, _ = gate_up.tensors.shape
        self._rows: Rows = (slice(0), slice(0))

    def refusal(self, boundary: Mapping[ir.Value, Array], given: Mapping[ir.Value, Array]) -> str | None:
        """Return why the nodes between the products do not compute SiLU(gate) * up, None if they do."""
        x, ids, again = (given[value] for value in self.reads)
        if not np.array_equal(ids.reshape(-1), again.reshape(-1)):
            return "its down projections use other expert ids than its gate and up projections"
        between = region([*boundary, self._gate_up.node.outputs[0]], self._down.x, max_nodes=MAX_BETWEEN)
        if isinstance(between, str):
            return between
        shape = (len(x), 1, self._width) if self._gate_up.transposed else (len(x), self._width, 1)

        def compute(hidden: Array) -> Array:
            made = between(*boundary.values(), hidden.reshape(shape))
            return made.reshape(len(x), -1) if made.size else made

        found = gated_activation(compute, len(x), self._width, between.numbers())
        if found is None:
            return between.failure or "its experts do not compute SiLU(gate) * up between their products"
        self.activation, self._rows = found
        return None

    def substitute(self, given: Mapping[ir.Value, Array], factors: Array) -> Array:
        """Return the result if expert i only multiplied its tokens by ``factors[i]``."""
        x, ids, _ = (given[value] for value in self.reads)
        result = x.reshape(len(x), -1) * factors[ids.reshape(-1)][:, None]
        return np.asarray(result[:, None] if self._down.transposed else result[:, :, None])

    def weights(self, graph: ir.Graph, before: ir.Node) -> list[ExpertWeights]:
        """Return the experts' weights, sliced from the stacked weights."""
        return split_experts(self._gate_up.tensors, self._rows, self._down.tensors, graph, before)


def stacked_experts(graph: ir.Graph) -> Iterator[StackedExperts]:
    """Yield the candidate experts of a graph."""
    found = (_stacked_product(node) for node in nodes_of(graph, "MatMul"))
    products = {one.node: one for one in found if one is not None}
    for down in products.values():
        gate_up = nearest_upstream(down.x, products)
        if gate_up is not None:
            count, width, hidden = gate_up.tensors.shape
            if down.tensors.shape == (count, hidden, width // 2):
                yield StackedExperts(gate_up, down)


def _stacked_product(node: ir.Node) -> _StackedProduct | None:
    for index, (chosen, x) in enumerate((node.inputs, node.inputs[::-1])):
        gather = chosen.producer() if chosen is not None else None
        if gather is None or x is None or gather.op_type not in ("Gather", "GatherND") or gather.domain:
            continue
        stack, ids = gather.inputs
        tensor = weight(stack)
        along = int_attribute(gather, "axis", 0) or int_attribute(gather, "batch_dims", 0)
        if (
            stack is not None
            and ids is not None
            and tensor is not None
            and len(tensor.shape) == 3
            and not along
        ):
            return _StackedProduct(node, x, ids, stack, transposed=index == 1)
    return None


def nearest_upstream(value: ir.Value, products: Mapping[ir.Node, T]) -> T | None:
    """Return the nearest product upstream of ``value``."""
    stack, seen = [value], {value}
    while stack and len(seen) < MAX_BETWEEN:
        node = stack.pop(0).producer()
        if node is None:
            continue
        if node in products:
            return products[node]
        fresh = [value for value in node.inputs if value is not None and value not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    return None
