"""Write the canonical mixture of experts of docs/architecture.md into a graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from .edit import insert, shared_constant

Weights = tuple[ir.Value, ir.Value, ir.Value]  # of gate and up, [hidden, width], and of down, [width, hidden]


def write_mixture(
    before: ir.Node,
    x: ir.Value,
    scores: ir.Value,
    experts: Sequence[Weights],
    *,
    hidden: int,
    per_token: int,
    normalize: bool,
) -> ir.Value:
    """Write a mixture in front of a node that everything it reads precedes.

    Args:
        before: the node.
        x: [..., hidden].
        scores: the router's, [..., experts], before the softmax.
        experts: their weights, in the router's order.
        hidden: the size of x.
        per_token: how many experts a token asks.
        normalize: the weights of a token's experts are scaled to sum to 1.

    Returns:
        The result, of x's shape.
    """
    write = _Writer(before)
    op, ints = write.op, write.ints
    tokens = op("Reshape", x, ints(-1, hidden))
    shares, chosen = write.routing(scores, len(experts), per_token, normalize=normalize)
    flat = op("Reshape", chosen, ints(-1))
    order = write.argsort(flat)
    depth = shared_constant(write.graph, f"experts.count_{len(experts)}", np.array(len(experts)))
    sizes = op("ReduceSum", op("OneHot", flat, depth, ints(0, 1), axis=-1), ints(0), keepdims=0)
    copies = op("Gather", tokens, op("Div", order, ints(per_token)))
    groups = insert(before, "Split", [copies, sizes], {"axis": 0}, num_outputs=len(experts)).outputs
    results = [write.expert(group, weights) for group, weights in zip(groups, experts, strict=True)]
    by_token = op("Gather", op("Concat", *results, axis=0), write.argsort(order))
    of_token = op("Reshape", by_token, ints(-1, per_token, hidden))
    result = op("Reshape", op("MatMul", op("Unsqueeze", shares, ints(1)), of_token), op("Shape", x))
    result.shape, result.type = x.shape, x.type or experts[0][-1].type
    return result


class _Writer:
    """Inserts nodes in front of one."""

    def __init__(self, before: ir.Node) -> None:
        if not isinstance(before.graph, ir.Graph):
            raise TypeError(f"node {before.name} belongs to no graph")
        self.before, self.graph = before, before.graph

    def op(self, op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        return insert(self.before, op_type, inputs, attributes).outputs[0]

    def ints(self, *numbers: int) -> ir.Value:
        name = "experts.ints_" + "_".join(map(str, numbers))
        return shared_constant(self.graph, name, np.array(numbers, np.int64))

    def argsort(self, numbers: ir.Value) -> ir.Value:
        operands = [numbers, self.op("Shape", numbers)]
        return insert(self.before, "TopK", operands, {"axis": 0, "largest": 0}, num_outputs=2).outputs[1]

    def routing(
        self, scores: ir.Value, count: int, per_token: int, *, normalize: bool
    ) -> tuple[ir.Value, ir.Value]:
        """Weights and numbers of each token's experts, both [tokens, per_token]."""
        likely = self.op("Softmax", self.op("Reshape", scores, self.ints(-1, count)), axis=-1)
        operands = [likely, self.ints(per_token)]
        shares, chosen = insert(self.before, "TopK", operands, {"axis": -1}, num_outputs=2).outputs
        if normalize:
            shares = self.op("Div", shares, self.op("ReduceSum", shares, self.ints(-1), keepdims=1))
        return shares, chosen

    def expert(self, group: ir.Value, weights: Weights) -> ir.Value:
        """down(silu(gate(x)) * up(x))."""
        gate, up, down = weights
        opened = self.op("MatMul", group, gate)
        product = self.op(
            "Mul", self.op("Mul", opened, self.op("Sigmoid", opened)), self.op("MatMul", group, up)
        )
        return self.op("MatMul", product, down)
