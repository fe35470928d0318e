"""Write the canonical mixture of experts of docs/contract.md into a graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ...records import dataclass
from ..graph.edit import insert, shared_constant
from .mixture import Activation

LinearWeights = tuple[ir.Value, ir.Value | None]  # weight [in, out], may be dequantized, and bias [out]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of an expert: gate and up [hidden, width], down [width, hidden]."""

    gate: LinearWeights
    up: LinearWeights | None
    down: LinearWeights


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens are routed to experts.

    Args:
        scores: the router's logits [..., experts].
        per_token: number of experts per token: those with the largest scores.
        normalize: whether the routing weights of a token are scaled to sum to 1.
        weights: the routing weights [..., experts]; None for the softmax of the scores.
    """

    scores: ir.Value
    per_token: int
    normalize: bool
    weights: ir.Value | None = None


def write_mixture(
    before: ir.Node,
    x: ir.Value,
    routing: Routing,
    experts: Sequence[ExpertWeights],
    *,
    hidden: int,
    activation: Activation | None = None,
) -> ir.Value:
    """Write a mixture of experts in front of a node.

    Args:
        before: the node; everything that the mixture reads must precede it.
        x: [..., hidden].
        routing: how tokens are routed to experts.
        experts: the experts' weights, in the router's order.
        hidden: size of the last axis of x.
        activation: the function between the products; SiLU by default.

    Returns:
        The result, with the shape of x.
    """
    write = _Writer(before, activation or Activation())
    op, ints = write.op, write.ints
    tokens = op("Reshape", x, ints(-1, hidden))
    shares, chosen = write.routing(routing, len(experts))
    flat = op("Reshape", chosen, ints(-1))
    order = write.argsort(flat)
    depth = shared_constant(write.graph, f"experts.count_{len(experts)}", np.array(len(experts)))
    sizes = op("ReduceSum", op("OneHot", flat, depth, ints(0, 1), axis=-1), ints(0), keepdims=0)
    copies = op("Gather", tokens, op("Div", order, ints(routing.per_token)))
    groups = insert(before, "Split", [copies, sizes], {"axis": 0}, num_outputs=len(experts)).outputs
    results = [write.expert(group, weights) for group, weights in zip(groups, experts, strict=True)]
    by_token = op("Gather", op("Concat", *results, axis=0), write.argsort(order))
    of_token = op("Reshape", by_token, ints(-1, routing.per_token, hidden))
    result = op("Reshape", op("MatMul", op("Unsqueeze", shares, ints(1)), of_token), op("Shape", x))
    result.shape, result.type = x.shape, x.type or experts[0].down[0].type
    return result


class _Writer:
    """Inserts the nodes of a mixture in front of ``before``."""

    def __init__(self, before: ir.Node, activation: Activation) -> None:
        if not isinstance(before.graph, ir.Graph):
            raise TypeError(f"node {before.name} belongs to no graph")
        self.before, self.graph, self.activation = before, before.graph, activation

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        return insert(self.before, op_type, inputs, attributes).outputs[0]

    def ints(self, *numbers: int) -> ir.Value:
        name = "experts.ints_" + "_".join(map(str, numbers))
        return shared_constant(self.graph, name, np.array(numbers, np.int64))

    def argsort(self, numbers: ir.Value) -> ir.Value:
        operands = [numbers, self.op("Shape", numbers)]
        return insert(self.before, "TopK", operands, {"axis": 0, "largest": 0}, num_outputs=2).outputs[1]

    def routing(self, routing: Routing, count: int) -> tuple[ir.Value, ir.Value]:
        """Return routing weights and indices of each token's experts, both [tokens, per_token]."""
        scores = self.op("Reshape", routing.scores, self.ints(-1, count))
        ranked = self.op("Softmax", scores, axis=-1) if routing.weights is None else scores
        operands = [ranked, self.ints(routing.per_token)]
        shares, chosen = insert(self.before, "TopK", operands, {"axis": -1}, num_outputs=2).outputs
        if routing.weights is not None:
            weights = self.op("Reshape", routing.weights, self.ints(-1, count))
            shares = self.op("GatherElements", weights, chosen, axis=1)
        if routing.normalize:
            shares = self.op("Div", shares, self.op("ReduceSum", shares, self.ints(-1), keepdims=1))
        return shares, chosen

    def expert(self, group: ir.Value, weights: ExpertWeights) -> ir.Value:
        """Write down(act(gate(x)) * up(x))."""
        activation = self.activation
        value = self.activated(self.clipped(self.linear(group, weights.gate), -math.inf, activation.limit))
        if weights.up is not None:
            other = self.clipped(self.linear(group, weights.up), -activation.limit, activation.limit)
            if activation.beta:
                other = self.op("Add", other, self.number(activation.beta, other))
            value = self.op("Mul", value, other)
        return self.linear(value, weights.down)

    def activated(self, value: ir.Value) -> ir.Value:
        """Apply the activation function."""
        name, alpha = self.activation.name, self.activation.alpha
        if name == "silu":
            scaled = value if alpha == 1.0 else self.op("Mul", value, self.number(alpha, value))
            return self.op("Mul", value, self.op("Sigmoid", scaled))
        if name == "gelu":
            return self.op("Gelu", value, approximate="tanh")
        return self.op("Relu", value) if name == "relu" else value

    def linear(self, x: ir.Value, weights: LinearWeights) -> ir.Value:
        """Write x @ W (+ bias)."""
        matrix, bias = weights
        product = self.op("MatMul", x, matrix)
        product.type = matrix.type
        if bias is None:
            return product
        output = self.op("Add", product, bias)
        output.type = matrix.type
        return output

    def clipped(self, value: ir.Value, low: float, high: float) -> ir.Value:
        """Clip to [low, high]; nothing is written if ``high`` is infinite."""
        if math.isinf(high):
            return value
        bounds = (None if math.isinf(low) else self.number(low, value), self.number(high, value))
        output = self.op("Clip", value, *bounds)
        output.type = value.type
        return output

    def number(self, number: float, like: ir.Value) -> ir.Value:
        """Return a scalar constant with the type of ``like``."""
        dtype = like.dtype or ir.DataType.FLOAT
        name = f"experts.{dtype.name.lower()}_{number!r}"
        return shared_constant(self.graph, name, np.array(number, dtype.numpy()))
