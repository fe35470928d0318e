"""Find candidate experts in a traced graph."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import Protocol, TypeVar

import numpy as np
import onnx_ir as ir

from ...records import dataclass
from ..analysis.region import region
from ..graph.edit import int_attribute, nodes_of, sole_consumer, weight
from ..graph.lazy import Array, reshape, shape_of
from .expert_tensors import FloatExperts, split_experts
from .gated_activation import Rows, gated_activation
from .mixture import Activation, Expert, gated_mlp
from .write_mixture import ExpertWeights

MAX_BETWEEN = 64  # nodes between the two products of stacked experts


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


class _Product(Protocol):
    """A product of rows ``x`` with the matrices of experts."""

    @property
    def x(self) -> ir.Value: ...

    @property
    def tensors(self) -> FloatExperts: ...


P = TypeVar("P", bound=_Product)


@dataclass(frozen=True, slots=True)
class _DenseProduct:
    """A product of all tokens with the matrices of all experts, and the bias of each expert behind it."""

    x: ir.Value
    tensors: FloatExperts
    output: ir.Value


class DenseExperts(ExpertPart):
    """All experts: gate and up projections in the first product, down in the second."""

    activation = Activation()

    def __init__(self, gate_up: _DenseProduct, down: _DenseProduct) -> None:
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


def _product(node: ir.Node) -> _DenseProduct | None:
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
            return _DenseProduct(x, stacked, added.outputs[0])
    return _DenseProduct(x, FloatExperts(str(stack.name), None, tensor, transposed=True), product)


@dataclass(frozen=True, slots=True)
class _StackedProduct:
    """A batched product of each row with its expert's matrix, and the expert's bias behind it.

    Args:
        x: the rows, [rows, 1, in] or [rows, in, 1].
        ids: those by which matrices, and biases if there are any, are gathered.
        tensors: matrices and biases of all experts.
        output: the result: [rows, 1, out] or [rows, out, 1]; [rows, out] with biases.
    """

    x: ir.Value
    ids: tuple[ir.Value, ...]
    tensors: FloatExperts
    output: ir.Value

    def shaped(self, rows: Array) -> Array:
        """Return results [rows, out] in the shape of ``output``."""
        if len(self.ids) > 1:
            return rows
        return rows[:, None] if self.tensors.transposed else rows[:, :, None]


class StackedExperts(ExpertPart):
    """All experts in two batched products: gate and up projections in the first, down in the second.

    transformers' ``batched_mm`` computes experts this way (integrations/moe.py).
    """

    activation = Activation()

    def __init__(self, gate_up: _StackedProduct, down: _StackedProduct) -> None:
        self._gate_up, self._down = gate_up, down
        self.reads, self.result = (gate_up.x, *gate_up.ids, *down.ids), down.output
        self.count, self._width, _ = gate_up.tensors.shape
        self._rows: Rows = (slice(0), slice(0))

    def refusal(self, boundary: Mapping[ir.Value, Array], given: Mapping[ir.Value, Array]) -> str | None:
        """Return why the nodes between the products do not compute SiLU(gate) * up, None if they do."""
        x, *ids = (given[value] for value in self.reads)
        if any(not np.array_equal(ids[0].reshape(-1), each.reshape(-1)) for each in ids[1:]):
            return "its projections or their biases use different expert ids"
        between = region([*boundary, self._gate_up.output], self._down.x, max_nodes=MAX_BETWEEN)
        if isinstance(between, str):
            return between

        def compute(hidden: Array) -> Array:
            made = between(*boundary.values(), self._gate_up.shaped(hidden))
            return made.reshape(len(x), -1) if made.size else made

        found = gated_activation(compute, len(x), self._width, between.numbers())
        if found is None:
            return between.failure or "its experts do not compute SiLU(gate) * up between their products"
        self.activation, self._rows = found
        return None

    def substitute(self, given: Mapping[ir.Value, Array], factors: Array) -> Array:
        """Return the result if expert i only multiplied its tokens by ``factors[i]``."""
        x, ids = given[self._gate_up.x], given[self._gate_up.ids[0]]
        return self._down.shaped(x.reshape(len(x), -1) * factors[ids.reshape(-1)][:, None])

    def weights(self, graph: ir.Graph, before: ir.Node) -> list[ExpertWeights]:
        """Return the experts' weights, sliced from the stacked weights."""
        return split_experts(self._gate_up.tensors, self._rows, self._down.tensors, graph, before)


def stacked_experts(graph: ir.Graph) -> Iterator[StackedExperts]:
    """Yield the candidate experts of a graph."""
    nodes = nodes_of(graph, "MatMul")
    products = {node: one for node in nodes if (one := _stacked_product(node)) is not None}
    for pair in pairs_of(products):
        yield StackedExperts(*pair)


def _stacked_product(node: ir.Node) -> _StackedProduct | None:
    for transposed, (chosen, x) in ((False, node.inputs), (True, node.inputs[::-1])):
        gathered = _gathered(chosen, rank=3)
        if gathered is None or x is None:
            continue
        stack, tensor, ids = gathered
        squeezed = sole_consumer(node.outputs[0])
        added = sole_consumer(squeezed.outputs[0]) if squeezed and squeezed.op_type == "Squeeze" else None
        for value in added.inputs if added is not None and added.op_type == "Add" else ():
            biases = _gathered(value, rank=2)
            if added is not None and biases is not None:
                tensors = FloatExperts(stack, biases[1], tensor, transposed)
                return _StackedProduct(x, (ids, biases[2]), tensors, added.outputs[0])
        return _StackedProduct(x, (ids,), FloatExperts(stack, None, tensor, transposed), node.outputs[0])
    return None


def _gathered(value: ir.Value | None, rank: int) -> tuple[str, ir.TensorProtocol, ir.Value] | None:
    """Return name and content of a weight [experts, ...] and the ids by which its rows are gathered."""
    gather = value.producer() if value is not None else None
    if gather is None or gather.op_type not in ("Gather", "GatherND") or gather.domain:
        return None
    stack, ids = gather.inputs
    tensor = weight(stack)
    along = int_attribute(gather, "axis", 0) or int_attribute(gather, "batch_dims", 0)
    if stack is None or ids is None or tensor is None or len(tensor.shape) != rank or along:
        return None
    return str(stack.name), tensor, ids


def pairs_of(products: Mapping[ir.Node, P]) -> Iterator[tuple[P, P]]:
    """Yield products whose outputs are gate and up, each with the product behind it whose inputs fit."""
    for down in products.values():
        gate_up = _nearest_upstream(down.x, products)
        if gate_up is not None:
            count, width, hidden = gate_up.tensors.shape
            if down.tensors.shape == (count, hidden, width // 2):
                yield gate_up, down


def _nearest_upstream(value: ir.Value, products: Mapping[ir.Node, P]) -> P | None:
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
        gate, *up, down = ((layer.weight, layer.bias) for layer in self._expert.layers)
        return [ExpertWeights(gate, up[0] if up else None, down)]


def expert_parts(graph: ir.Graph) -> dict[ir.Value, ExpertPart]:
    """Return the candidate experts of a graph, by their result."""
    mlps = (gated_mlp(node) for node in nodes_of(graph, "Sigmoid"))
    parts: list[ExpertPart] = [SingleExpert(mlp) for mlp in mlps if mlp is not None]
    return {part.result: part for part in (*parts, *stacked_experts(graph), *dense_experts(graph))}
