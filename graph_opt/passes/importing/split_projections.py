"""Split fused projections into one MatMul per part, and rewrite Gemm as MatMul and Add.

In the canonical graph q, k and v, and gate and up, are separate; a lowering merges them again where that is
faster. Weights are sliced lazily.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import onnx_ir as ir

from ....records import dataclass
from ...graph.edit import (
    add_initializer,
    certainly_equal,
    constant,
    insert,
    int_attribute,
    nodes_of,
    remove_unused,
    replace,
    shared_constant,
    weight,
)
from ...graph.lazy import lazy, shape_of, transpose
from ..base import GraphPass

_Part = tuple[ir.Value, int, int]
_Parts = dict[tuple[ir.Value, int, int], ir.Value]  # columns of a weight, by weight, start and end


@dataclass(frozen=True, slots=True)
class _Cut:
    """A product, its bias, and the parts that its result is split into."""

    node: ir.Node
    bias: ir.Value | None
    parts: list[_Part]

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Start and end column of each part."""
        return tuple((start, end) for _, start, end in self.parts)


class GemmToMatMulPass(GraphPass):
    """Rewrite Gemm(x, W, b) as MatMul and Add; reshapes to [batch * sequence, in] and back are removed."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite every Gemm of an activation and a weight."""
        for node in nodes_of(graph, "Gemm"):
            if _is_quantized_head(node):
                continue
            reason = _gemm_misfit(node)
            if reason is not None:
                self.refuse(node, reason)
                continue
            restored = _is_restored(node)
            x, operand = _unflattened(graph, node) if restored else node.inputs[0], node.inputs[1]
            matrix = weight(operand)
            if operand is None or matrix is None:
                raise AssertionError("unreachable: the Gemm was checked")
            if int_attribute(node, "transB", 0):
                operand = add_initializer(graph, f"{operand.name}.transposed", transpose(matrix))
            output = insert(node, "MatMul", [x, operand]).outputs[0]
            if len(node.inputs) > 2 and node.inputs[2] is not None:
                output = insert(node, "Add", [output, node.inputs[2]]).outputs[0]
            last = next(iter(node.outputs[0].uses())).node if restored else node
            replace(last.outputs[0], output)
            remove_unused(graph, last)
            self.fired += 1


class SplitProjectionsPass(GraphPass):
    """Rewrite Split(MatMul(x, W) + b) as one MatMul per part.

    A weight of several products is split once, and only if all of them split it at the same columns.
    """

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite every MatMul with a weight whose result is only read in parts."""
        cuts: dict[ir.Value, list[_Cut]] = defaultdict(list)
        for node in nodes_of(graph, "MatMul"):
            operand, matrix = node.inputs[1], weight(node.inputs[1])
            if operand is None or matrix is None or len(matrix.shape) != 2:
                continue
            width = shape_of(matrix)[1]
            output, bias = _biased(node, width)
            parts = _columns(output, width)
            if isinstance(parts, str):
                self.refuse(node, parts)
            elif parts:
                cuts[operand].append(_Cut(node, bias, parts))
        for operand, product_cut in cuts.items():
            if len(operand.uses()) > len(product_cut) or len({cut.bounds for cut in product_cut}) > 1:
                self.refuse(product_cut[0].node, "other consumers of its weight split it differently")
                continue
            made: dict[tuple[ir.Value, int, int], ir.Value] = {}
            for cut in product_cut:
                _split(graph, cut, made)
                self.fired += 1


def _is_quantized_head(node: ir.Node) -> bool:
    """Return whether a Gemm reads a dequantized table with transB, as the contract's tied heads do."""
    table = node.inputs[1].producer() if node.inputs[1] is not None else None
    return (
        table is not None and table.op_type == "DequantizeLinear" and bool(int_attribute(node, "transB", 0))
    )


def _gemm_misfit(node: ir.Node) -> str | None:
    factors = [node.attributes.get(name) for name in ("alpha", "beta")]
    if int_attribute(node, "transA", 0) or any(f is not None and f.as_float() != 1 for f in factors):
        return "it has transA, alpha or beta"
    if weight(node.inputs[1]) is None or weight(node.inputs[0]) is not None:
        return "it is not a product of an activation and a weight"
    if int_attribute(node, "transB", 0) and len(node.inputs[1].uses() if node.inputs[1] else ()) > 1:
        return "its weight has other consumers, as that of a tied head"
    return None


def _is_restored(node: ir.Node) -> bool:
    """Return whether a Gemm's input was flattened to rows, and its result is reshaped back."""
    source, rows = _flattened(node.inputs[0]), node.outputs[0]
    readers = list(rows.uses())
    if len(readers) != 1 or readers[0].node.op_type != "Reshape" or rows.is_graph_output():
        return False
    result = readers[0].node.outputs[0].shape
    if source is None or source.shape is None or result is None:
        return False
    lead = len(result) - 1
    return certainly_equal(*(ir.Shape(list(shape)[:lead]) for shape in (result, source.shape)))


def _flattened(value: ir.Value | None) -> ir.Value | None:
    """Return the input of the Reshape that made ``value``, else None."""
    node = value.producer() if value is not None else None
    return node.inputs[0] if node is not None and node.op_type == "Reshape" and not node.domain else None


def _unflattened(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """Return the input of a checked Gemm as [..., in], with the leading axes of its reshaped result."""
    source, matrix = _flattened(node.inputs[0]), weight(node.inputs[1])
    result = next(iter(node.outputs[0].uses())).node.outputs[0].shape
    if source is None or matrix is None or result is None:
        raise AssertionError("unreachable: the Gemm was checked")
    width = shape_of(matrix)[1 if int_attribute(node, "transB", 0) else 0]
    target = [0] * (len(result) - 1) + [width]
    shape = shared_constant(graph, "shape." + "_".join(map(str, target)), np.array(target, np.int64))
    return insert(node, "Reshape", [source, shape]).outputs[0]


def _biased(node: ir.Node, width: int) -> tuple[ir.Value, ir.Value | None]:
    """Return the output of a product and its bias, the bias None if there is none."""
    output = node.outputs[0]
    readers = list(output.uses())
    if len(readers) == 1 and readers[0].node.op_type == "Add" and not output.is_graph_output():
        bias = readers[0].node.inputs[1 - readers[0].idx]
        tensor = weight(bias)
        if tensor is not None and shape_of(tensor) == (width,):
            return readers[0].node.outputs[0], bias
    return output, None


def _columns(value: ir.Value, width: int) -> list[_Part] | str:
    """Return the parts that a value is split into, each with its start and end column, or why it is not."""
    parts: list[_Part] = []
    for use in value.uses():
        found = _cut(use.node, width) if use.idx == 0 else None
        if found is None:
            return "its result is read both whole and in parts" if parts else []
        parts += found
    if value.is_graph_output() and parts:
        return "its result is a graph output"
    return sorted(parts, key=lambda part: part[1])


def _cut(node: ir.Node, width: int) -> list[_Part] | None:
    rank = len(node.inputs[0].shape) if node.inputs[0] and node.inputs[0].shape is not None else 0
    if node.op_type == "Split" and int_attribute(node, "axis", 0) in (-1, rank - 1):
        sizes = _sizes(node, width)
        if sizes is None:
            return None
        ends = np.cumsum(sizes).tolist()
        return list(zip(node.outputs, [0, *ends[:-1]], ends, strict=True))
    if node.op_type != "Slice" or len(node.inputs) < 4:
        return None
    bounds = [constant(value) for value in node.inputs[1:]]
    if any(bound is None or bound.size != 1 for bound in bounds):
        return None
    start, end, axis, *step = (int(bound.item()) for bound in bounds if bound is not None)
    if axis not in (-1, rank - 1) or step not in ([], [1]):
        return None
    start, end, _ = slice(start, end).indices(width)
    return [(node.outputs[0], start, end)] if start < end else None


def _sizes(node: ir.Node, width: int) -> list[int] | None:
    """Return the sizes of a Split's parts; by default equal ones, the last one may be smaller."""
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        sizes = constant(node.inputs[1])
        return None if sizes is None else sizes.tolist()
    whole = -(-width // len(node.outputs))
    return [*[whole] * (len(node.outputs) - 1), width - whole * (len(node.outputs) - 1)]


def _split(graph: ir.Graph, cut: _Cut, parts: _Parts) -> None:
    node = cut.node
    for output, start, end in cut.parts:
        columns = _part(graph, node.inputs[1], start, end, parts)
        result = insert(node, "MatMul", [node.inputs[0], columns]).outputs[0]
        if cut.bias is not None:
            result = insert(node, "Add", [result, _part(graph, cut.bias, start, end, parts)]).outputs[0]
        reader = output.producer()
        replace(output, result)
        remove_unused(graph, reader)


def _part(graph: ir.Graph, value: ir.Value | None, start: int, end: int, parts: _Parts) -> ir.Value:
    tensor = weight(value)
    if value is None or tensor is None:
        raise AssertionError("unreachable: the operand was checked to be a weight")
    if (value, start, end) not in parts:
        shape = (*shape_of(tensor)[:-1], end - start)
        columns = lazy(lambda: tensor.numpy()[..., start:end].copy(), tensor.dtype, shape)
        parts[value, start, end] = add_initializer(graph, f"{value.name}.columns_{start}_{end}", columns)
    return parts[value, start, end]
