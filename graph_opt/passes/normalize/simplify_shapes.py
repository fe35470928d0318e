"""Fold shape arithmetic into constants, and remove Reshape, Expand, Slice and similar nodes without effect.

The pass uses evaluated facts (``shape_facts.py``) instead of patterns. It also annotates every value with
its type and shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...analysis.qdq import JOINS_PAIRS, ROUNDS_PRODUCT, joins_pairs, rounds_product
from ...analysis.shape_facts import ShapeFacts, Shapes
from ...graph.edit import insert, replace, shared_constant
from ..base import GraphPass

_SHAPE_CHANGERS = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Flatten"})
# Each type holds all values of those before it.
_RISING = (
    ("BOOL", "INT8", "INT16", "INT32", "INT64"),
    ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64"),
    ("FLOAT16", "FLOAT", "DOUBLE"),
    ("BFLOAT16", "FLOAT", "DOUBLE"),
)


class SimplifyShapesPass(GraphPass):
    """Fold constants, remove nodes without effect, and annotate shapes.

    Args:
        decoder: whether inputs of the contract's names have the contract's axes.
    """

    def __init__(self, *, decoder: bool = True) -> None:
        super().__init__()
        self._decoder = decoder

    def rewrite(self, graph: ir.Graph) -> None:
        """Simplify every node, producers first."""
        facts = ShapeFacts(graph, decoder=self._decoder)
        for value in [value for node in graph for value in node.outputs]:
            _annotate(facts, value)
        for node in list(graph):
            if len(node.outputs) == 1 and not node.domain and self._simplify(graph, facts, node):
                self.fired += 1

    def _simplify(self, graph: ir.Graph, facts: ShapeFacts, node: ir.Node) -> bool:
        output = node.outputs[0]
        if not output.uses() and not output.is_graph_output():
            return False
        content = facts.content(output)
        if content is not None and not output.is_graph_output():
            replace(output, _constant(graph, content))
            return True
        same = _equal_input(facts, node)
        if same is not None:
            if output.is_graph_output() and (same.is_graph_output() or same.producer() is None):
                return False
            return self._remove(node, same)
        if node.op_type in _SHAPE_CHANGERS:
            return self._reshape_by_constant(graph, facts, node)
        if node.op_type == "Expand":
            return _expand_by_constant(graph, facts, node)
        return node.op_type == "Transpose" and self._join_transposes(node)

    def _remove(self, node: ir.Node, source: ir.Value) -> bool:
        """Make the consumers of a node without effect read ``source``."""
        output = node.outputs[0]
        rounds = not self._decoder and rounds_product(source, output)
        if rounds or joins_pairs(source, output):
            self.refuse(node, ROUNDS_PRODUCT if rounds else JOINS_PAIRS)
            return False
        replace(output, source)
        return True

    def _join_transposes(self, node: ir.Node) -> bool:
        """Merge Transpose(Transpose(x)) into one Transpose, or x."""
        source = node.inputs[0]
        inner = source.producer() if source is not None else None
        if inner is None or inner.op_type != "Transpose" or inner.domain:
            return False
        outer_perm, inner_perm = _permutation(node), _permutation(inner)
        if outer_perm is None or inner_perm is None or inner.inputs[0] is None:
            return False
        joined = [inner_perm[axis] for axis in outer_perm]
        if joined == sorted(joined):
            return self._remove(node, inner.inputs[0])
        merged = insert(node, "Transpose", [inner.inputs[0]], {"perm": joined})
        replace(node.outputs[0], merged.outputs[0])
        return True

    def _reshape_by_constant(self, graph: ir.Graph, facts: ShapeFacts, node: ir.Node) -> bool:
        """Merge consecutive shape changes into one Reshape to a constant shape, or remove them."""
        source = node.inputs[0]
        while source is not None:
            inner = source.producer()
            if inner is None or inner.domain or inner.op_type not in _SHAPE_CHANGERS:
                break
            source = inner.inputs[0]
        before, after = facts.shapes(source), facts.shapes(node.outputs[0])
        if source is None or before is None or after is None:
            return False
        if before == after:
            return self._remove(node, source)
        target = reshape_target(before, after)
        if target is None or (source is node.inputs[0] and not _differs(facts, node, target)):
            return False
        shape = _constant(graph, np.array(target, np.int64))
        merged = insert(node, "Reshape", [source, shape])
        replace(node.outputs[0], merged.outputs[0])
        return True


def _annotate(facts: ShapeFacts, value: ir.Value) -> None:
    shape, dtype = facts.symbolic(value), facts.dtype(value)
    if shape is not None and dtype is not None and not value.is_graph_output():
        given = value.shape if value.shape is not None and len(value.shape) == len(shape) else shape
        dims = [
            new if isinstance(new, int) or new.value else old for new, old in zip(shape, given, strict=True)
        ]
        value.shape, value.dtype = ir.Shape(dims), ir.DataType(dtype)


def _constant(graph: ir.Graph, content: npt.NDArray[Any]) -> ir.Value:
    """Return the initializer with this content; equal contents share one."""
    digits = (
        "_".join(str(item) for item in content.reshape(-1)[:4].tolist()).replace(".", "p").replace("-", "m")
    )
    shape = "x".join(map(str, content.shape))
    name = f"const.{content.dtype.name}.{shape}.{digits}"
    if content.size > 4 or content.dtype.kind == "f":
        name += f".{content.tobytes().hex()[:64]}"
    return shared_constant(graph, name, content)


def _equal_input(facts: ShapeFacts, node: ir.Node) -> ir.Value | None:
    """Return the input that equals the node's output, None if there is none."""
    source = node.inputs[0] if node.inputs else None
    if source is None:
        return None
    equal = facts.shapes(source) is not None and facts.shapes(source) == facts.shapes(node.outputs[0])
    match node.op_type:
        case "Identity":
            return source
        case "Cast":
            return _exactly_cast(facts, node)
        case "Reshape" | "Expand" | "Unsqueeze" | "Squeeze" | "Flatten":
            return source if equal else None
        case "Slice":
            steps = facts.content(node.inputs[4]) if len(node.inputs) > 4 else np.ones(1)
            return source if equal and steps is not None and (steps > 0).all() else None
        case "Transpose":
            perm = _permutation(node)
            return source if perm is not None and perm == sorted(perm) else None
        case "Concat":
            return _only_part(facts, node)
        case _:
            return None


def _exactly_cast(facts: ShapeFacts, node: ir.Node) -> ir.Value | None:
    """Return the value that a Cast gives unchanged, maybe behind a Cast to a type that holds its values.

    onnxruntime drops such pairs even where a branch of If reads them, and cannot run the rest (1.32).
    """
    source, wanted = node.inputs[0], node.attributes["to"].as_int()
    if source is None or facts.dtype(source) == wanted:
        return source
    wider = source.producer()
    if wider is None or wider.op_type != "Cast" or wider.domain:
        return None
    first = wider.inputs[0]
    held = facts.dtype(first)
    if first is None or held != wanted or not _holds(wider.attributes["to"].as_int(), wanted):
        return None
    return first


def _holds(wider: int, narrow: int) -> bool:
    """Return whether each value of a type is one of another type, by the numbers of ONNX's types."""
    wide, small = ir.DataType(wider).name, ir.DataType(narrow).name
    return any(small in rising and wide in rising[rising.index(small) + 1 :] for rising in _RISING)


def _only_part(facts: ShapeFacts, node: ir.Node) -> ir.Value | None:
    """Return the only operand of a Concat that is not empty, else None."""
    shapes = [(value, facts.shapes(value)) for value in node.inputs]
    filled = [value for value, known in shapes if known is None or any(0 not in shape for shape in known)]
    return (
        filled[0] if len(filled) == 1 and facts.shapes(filled[0]) == facts.shapes(node.outputs[0]) else None
    )


def _permutation(node: ir.Node) -> list[int] | None:
    perm = node.attributes.get("perm")
    return None if perm is None else list(perm.as_ints())


def _expand_by_constant(graph: ir.Graph, facts: ShapeFacts, node: ir.Node) -> bool:
    """Replace the computed target shape of an Expand by a constant one, in which 1 keeps an axis."""
    before, after = facts.shapes(node.inputs[0]), facts.shapes(node.outputs[0])
    if before is None or after is None or facts.content(node.inputs[1]) is not None:
        return False
    extra = len(after[0]) - len(before[0])
    sources = [(1,) * len(after)] * extra + list(zip(*before, strict=True))
    target = []
    for source, sizes in zip(sources, zip(*after, strict=True), strict=True):
        if source != sizes and len(set(sizes)) > 1:
            return False
        target.append(1 if source == sizes else sizes[0])
    node.replace_input_with(1, _constant(graph, np.array(target, np.int64)))
    return True


def _differs(facts: ShapeFacts, node: ir.Node, target: Sequence[int]) -> bool:
    if node.op_type != "Reshape":
        return False
    present = facts.content(node.inputs[1])
    return present is None or present.tolist() != list(target)


def reshape_target(before: Shapes, after: Shapes) -> list[int] | None:
    """Return a constant ``shape`` operand for Reshape from one shape to another.

    Args:
        before: shape of the input for each set of sizes.
        after: shape of the output for each set of sizes.

    Returns:
        One number per axis: a size, 0 for the size of the input's axis of the same index, or -1, at most
        once, for the rest. None if no such shape exists.
    """
    sources = list(zip(*before, strict=True))
    target: list[int] = []
    for axis, sizes in enumerate(zip(*after, strict=True)):
        if axis < len(sources) and sources[axis] == sizes and len(set(sizes)) > 1:
            target.append(0)
        elif len(set(sizes)) == 1 and sizes[0]:
            target.append(sizes[0])
        elif not any(sizes):  # size 0 cannot be written: 0 means the input's axis
            if axis >= len(sources) or any(sources[axis]):
                return None
            target.append(0)
        else:
            target.append(-1)
    if -1 not in target:
        return target
    rest = target.index(-1)
    filled = all(0 not in (*sizes[:rest], *sizes[rest + 1 :]) for sizes in after)  # else -1 is ambiguous
    return target if target.count(-1) == 1 and filled else None
