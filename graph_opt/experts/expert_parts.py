"""The experts among a trace's nodes, as parts that a proof can replace by factors."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..analysis.region import close, region
from ..graph.edit import int_attribute, nodes_of, weight
from ..graph.lazy import Array
from .expert_tensors import ExpertLayer, FloatExperts
from .mixture import Activation, Expert, gated_mlp
from .write_mixture import ExpertWeights

_MOST_BETWEEN = 64  # nodes that the second product of stacked experts depends on, back to the tokens


class ExpertPart(abc.ABC):
    """One or several experts whose results are one value.

    Attributes:
        reads: what they compute from.
        result: what they compute.
        count: how many they are.
        activation: between their products.
    """

    reads: tuple[ir.Value, ...]
    result: ir.Value
    count: int
    activation: Activation

    @abc.abstractmethod
    def stand_in(self, given: Mapping[ir.Value, Array], factors: Array) -> Array:
        """Return the result if every expert only multiplied its tokens with its factor."""

    @abc.abstractmethod
    def weights(self, graph: ir.Graph, before: ir.Node) -> list[ExpertWeights]:
        """Return the experts' weights; new nodes are inserted in front of ``before``."""

    def doubt(self, boundary: Mapping[ir.Value, Array], given: Mapping[ir.Value, Array]) -> str | None:
        """Return why these are no experts after all.

        Args:
            boundary: random tokens and scores.
            given: what ``reads`` are for these.
        """
        return None


class SingleExpert(ExpertPart):
    """A gated MLP."""

    count = 1

    def __init__(self, expert: Expert) -> None:
        self._expert = expert
        self.reads, self.result = (expert.gate.x,), expert.down.output
        self.activation = expert.activation

    def stand_in(self, given: Mapping[ir.Value, Array], factors: Array) -> Array:
        """Return the result if the expert only multiplied its tokens with its factor."""
        return np.asarray(given[self.reads[0]] * factors[0])

    def weights(self, graph: ir.Graph, before: ir.Node) -> list[ExpertWeights]:
        """Return the expert's weights."""
        gate, up, down = ((layer.weight, layer.bias) for layer in self._expert.layers)
        return [ExpertWeights(gate, up, down)]


@dataclass(frozen=True, slots=True)
class _StackedProduct:
    """A product of each row with the matrix of its own expert, chosen by ``ids`` from [experts, ., .]."""

    node: ir.Node
    x: ir.Value
    ids: ir.Value
    stack: ir.Value
    transposed: bool  # the stack is [experts, in, out]

    @property
    def tensors(self) -> FloatExperts:
        tensor = weight(self.stack)
        if tensor is None:
            raise AssertionError("unreachable: it was checked to be a weight")
        return FloatExperts(str(self.stack.name), None, tensor, self.transposed)


class StackedExperts(ExpertPart):
    """All experts at once: one product opens each row by its expert's gate and up, one closes it.

    So transformers' ``batched_mm`` computes them (its integrations/moe.py).
    """

    activation = Activation()

    def __init__(self, opens: _StackedProduct, closes: _StackedProduct) -> None:
        self._opens, self._closes = opens, closes
        self.reads, self.result = (opens.x, opens.ids, closes.ids), closes.node.outputs[0]
        self.count, self._opened, _ = opens.tensors.shape
        self._rows = slice(0), slice(0)  # of gate and up

    def doubt(self, boundary: Mapping[ir.Value, Array], given: Mapping[ir.Value, Array]) -> str | None:
        """Return why what is between the products is not SiLU of one half times the other."""
        x, ids, again = (given[value] for value in self.reads)
        if not np.array_equal(ids.reshape(-1), again.reshape(-1)):
            return "its experts are closed by others than those that open them"
        between = region([*boundary, self._opens.node.outputs[0]], self._closes.x, max_nodes=_MOST_BETWEEN)
        if isinstance(between, str):
            return between
        opened = np.random.default_rng(self.count).standard_normal((len(x), self._opened)).astype(np.float32)
        found = between(*boundary.values(), opened[:, None] if self._opens.transposed else opened[:, :, None])
        for rows in _halves(self._opened):
            gate, up = (opened[:, each] for each in rows)
            if close(found.reshape(len(x), -1) if len(found) else found, gate / (1 + np.exp(-gate)) * up):
                self._rows = rows
                return None
        return (
            between.failure or "what is between its experts' products is not SiLU of one half times the other"
        )

    def stand_in(self, given: Mapping[ir.Value, Array], factors: Array) -> Array:
        """Return the result if every expert only multiplied its tokens with its factor."""
        x, ids, _ = (given[value] for value in self.reads)
        result = x.reshape(len(x), -1) * factors[ids.reshape(-1)][:, None]
        return np.asarray(result[:, None] if self._closes.transposed else result[:, :, None])

    def weights(self, graph: ir.Graph, before: ir.Node) -> list[ExpertWeights]:
        """Return the experts' weights, each cut from the stack."""
        names = (".gate", ".up")
        opens, closes = self._opens.tensors, ExpertLayer(self._closes.tensors)
        gate, up = (ExpertLayer(opens, rows, name) for rows, name in zip(self._rows, names, strict=True))
        return [
            ExpertWeights(*(layer.of(one, graph, before) for layer in (gate, up, closes)))
            for one in range(self.count)
        ]


def expert_parts(graph: ir.Graph) -> dict[ir.Value, ExpertPart]:
    """Return what may be experts in a graph, by their results."""
    mlps = (gated_mlp(node) for node in nodes_of(graph, "Sigmoid"))
    parts: list[ExpertPart] = [SingleExpert(mlp) for mlp in mlps if mlp is not None]
    return {part.result: part for part in (*parts, *_stacked_experts(graph))}


def _stacked_experts(graph: ir.Graph) -> Iterator[StackedExperts]:
    found = (_stacked_product(node) for node in nodes_of(graph, "MatMul"))
    products = {one.node: one for one in found if one is not None}
    for closes in products.values():
        opens = _behind(closes, products)
        if opens is not None:
            (count, opened, hidden), closed = opens.tensors.shape, closes.tensors.shape
            if closed == (count, hidden, opened // 2):
                yield StackedExperts(opens, closes)


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


def _behind(closes: _StackedProduct, products: Mapping[ir.Node, _StackedProduct]) -> _StackedProduct | None:
    """Return the stacked product that ``closes`` follows."""
    stack, seen = [closes.x], {closes.x}
    while stack and len(seen) < _MOST_BETWEEN:
        node = stack.pop().producer()
        if node is None:
            continue
        if node in products:
            return products[node]
        fresh = [value for value in node.inputs if value is not None and value not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    return None


def _halves(size: int) -> tuple[tuple[slice, slice], ...]:
    """Return where gate and up may lie."""
    half = size // 2
    return (slice(half), slice(half, None)), (slice(0, None, 2), slice(1, None, 2))
