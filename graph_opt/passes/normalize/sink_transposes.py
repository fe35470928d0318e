"""Move Transpose downstream past elementwise operators, so that it meets and cancels its inverse.

    Add(Transpose(x), c)               -> Transpose(Add(x, c'))       c' is c with inversely permuted axes
    Add(Transpose(x), Transpose(y))    -> Transpose(Add(x, y))        if the permutations are equal
    Pad(Transpose(x), pads)            -> Transpose(Pad(x, pads'))
    ReduceMean(Transpose(x), axes)     -> Transpose(ReduceMean(x, axes'))

Graphs of channels-last frameworks have a Transpose on each side of every convolution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ...graph.edit import (
    add_initializer,
    certainly_equal,
    constant,
    insert,
    int_attribute,
    remove_unused,
    replace,
    shared_constant,
    weight,
)
from ...graph.lazy import shape_of
from ..base import EveryGraphPass

_UNARY = frozenset(
    {"Abs", "Cast", "Ceil", "Clip", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish"}
    | {"LeakyRelu", "Log", "Neg", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Softplus"}
    | {"Softsign", "Sqrt", "Tanh", "ThresholdedRelu", "Identity", "Not"}
)
_ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "And", "Or", "Equal", "Greater", "Less", "PRelu"}
)
_REDUCTIONS = frozenset({"ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"})
_SMALL = 1 << 16  # elements of a constant that may be permuted


class SinkTransposesPass(EveryGraphPass):
    """Move each Transpose past its only consumer, as long as possible."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Traverse the graph once; a moved Transpose is met again further downstream."""
        for node in list(graph):
            if node.graph is not graph or node.domain or not node.inputs:
                continue
            perm = _permutation(node, node.inputs)
            if perm is not None and self._move(graph, node, perm):
                self.fired += 1

    def _move(self, graph: ir.Graph, node: ir.Node, perm: list[int]) -> bool:
        if len(node.outputs) != 1:
            return False
        operands = _sources(graph, node, perm) if _keeps_shape(node) else None
        if operands is None:
            return False
        attributes, after = dict(node.attributes), perm
        if node.op_type == "Pad":
            pads = _moved_pads(graph, node, perm)
            if pads is None:
                return False
            operands[1] = pads
        elif node.op_type in _REDUCTIONS:
            moved = _moved_axes(graph, node, perm)
            if moved is None:
                return False
            operands[1], after = moved
        copy = insert(node, node.op_type, operands, attributes)
        copy.name = node.name
        back = insert(node, "Transpose", [copy.outputs[0]], {"perm": after}) if after else copy
        old = node.outputs[0]
        if back is not copy:
            copy.outputs[0].type = old.type
            copy.outputs[0].shape = _permuted(old.shape, _inverse(after))
        replace(old, back.outputs[0])
        remove_unused(graph, node)
        return True


def _permutation(node: ir.Node, operands: Sequence[ir.Value | None]) -> list[int] | None:
    """Return the common permutation of all varying operands of a node, None if one has other consumers."""
    if node.op_type not in _UNARY | _ELEMENTWISE | _REDUCTIONS | {"Pad"}:
        return None
    varying = [x for x in operands if x is not None and weight(x) is None]
    permutations = [_transposed(x) for x in varying]
    if not permutations or permutations[0] is None or any(perm != permutations[0] for perm in permutations):
        return None
    if any(len({use.node for use in x.uses()}) > 1 or x.is_graph_output() for x in varying):
        return None
    return permutations[0]


def _keeps_shape(node: ir.Node) -> bool:
    """Return whether an elementwise node does not broadcast; else the Transpose behind it would be larger."""
    if node.op_type not in _ELEMENTWISE:
        return True
    varying = [x for x in node.inputs if x is not None and weight(x) is None]
    return all(certainly_equal(x.shape, node.outputs[0].shape) for x in varying)


def _transposed(value: ir.Value) -> list[int] | None:
    node = value.producer()
    if node is None or node.op_type != "Transpose" or node.domain or "perm" not in node.attributes:
        return None
    return list(node.attributes["perm"].as_ints())


def _sources(graph: ir.Graph, node: ir.Node, perm: list[int]) -> list[ir.Value | None] | None:
    """Return the operands without their transposition; None if a constant cannot be permuted."""
    sources: list[ir.Value | None] = []
    for index, operand in enumerate(node.inputs):
        producer = operand.producer() if operand is not None else None
        if operand is None or (index and node.op_type not in _ELEMENTWISE):
            sources.append(operand)
        elif weight(operand) is not None:
            moved = _unpermuted(graph, operand, perm)
            if moved is None:
                return None
            sources.append(moved)
        else:
            sources.append(producer.inputs[0] if producer is not None else None)
    return sources


def _unpermuted(graph: ir.Graph, operand: ir.Value, perm: list[int]) -> ir.Value | None:
    """Return a constant with inversely permuted axes."""
    tensor = weight(operand)
    if tensor is None or tensor.size > _SMALL or len(shape_of(tensor)) > len(perm):
        return None
    if tensor.size == 1 and len(shape_of(tensor)) <= 1:
        return operand
    shape = (1,) * (len(perm) - len(shape_of(tensor))) + shape_of(tensor)
    content = np.ascontiguousarray(tensor.numpy().reshape(shape).transpose(_inverse(perm)))
    return add_initializer(graph, f"{operand.name}.unpermuted", content)


def _moved_pads(graph: ir.Graph, node: ir.Node, perm: list[int]) -> ir.Value | None:
    pads = constant(node.inputs[1]) if len(node.inputs) in (2, 3) else None
    if pads is None or pads.size != 2 * len(perm):
        return None
    halves = pads.reshape(2, -1)[:, _inverse(perm)].reshape(-1)
    return shared_constant(graph, "pads." + "_".join(map(str, halves)).replace("-", "m"), halves)


def _moved_axes(graph: ir.Graph, node: ir.Node, perm: list[int]) -> tuple[ir.Value, list[int]] | None:
    """Return the axes to reduce before the transposition, and the permutation that remains after it."""
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None or not axes.size:
        return None
    before = sorted(perm[axis] for axis in axes.tolist())
    numbers = np.array(before, np.int64)
    operand = shared_constant(graph, "axes." + "_".join(map(str, before)), numbers)
    if int_attribute(node, "keepdims", 1):
        return operand, perm
    left = [axis for axis in perm if axis not in before]
    after = [sorted(left).index(axis) for axis in left]
    return operand, after if after != sorted(after) else []


def _inverse(perm: Sequence[int]) -> list[int]:
    return [list(perm).index(axis) for axis in range(len(perm))]


def _permuted(shape: ir.Shape | None, perm: Sequence[int]) -> ir.Shape | None:
    return None if shape is None else ir.Shape([shape[axis] for axis in perm])
