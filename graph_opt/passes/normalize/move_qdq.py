"""Move QuantizeLinear and DequantizeLinear across operators that only move values (``MOVERS``).

    QuantizeLinear(DequantizeLinear(x))                 -> x, if the parameters are equal
    op(DequantizeLinear(x))                             -> DequantizeLinear(op(x))
    op(DequantizeLinear(QuantizeLinear(x)))             -> DequantizeLinear(QuantizeLinear(op(x)))
    QuantizeLinear(op(x)), without a DequantizeLinear   -> op(QuantizeLinear(x))
    Transpose(DequantizeLinear(W))                      -> DequantizeLinear(Transpose(W))

So values are moved as 8-bit integers where possible, and a QDQ pair that denotes int8 arithmetic stays a
pair in front of the operator that computes. The results are bit-identical. A move that would put two pairs
of unequal parameters in a row is refused, because onnxruntime merges those.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ....records import dataclass
from ...analysis.qdq import (
    JOINS_PAIRS,
    MOVERS,
    RESHAPES,
    ROUNDS_PRODUCT,
    Parameters,
    cannot_move,
    joins_pairs,
    moved_axis,
    parameters,
    rounds_product,
)
from ...graph.edit import can_return, insert, remove_unused, replace, sole_consumer
from ..base import EveryGraphPass

_QUANTIZE, _DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
_SAME_SIZE = RESHAPES | {
    "Transpose",
    "Concat",
}  # the other movers drop elements, so quantizing later is cheaper


@dataclass(frozen=True, slots=True)
class _Dequantized:
    """A DequantizeLinear, and the QuantizeLinear before it if that has no other consumer."""

    node: ir.Node
    found: Parameters
    quantize: ir.Node | None

    def source(self, *, pair: bool) -> ir.Value | None:
        return (self.quantize if pair and self.quantize is not None else self.node).inputs[0]


class MoveQDQPass(EveryGraphPass):
    """Move DequantizeLinear downstream and QuantizeLinear upstream, and remove pairs that cancel.

    Args:
        decoder: whether a weight may become the direct operand of a product, which kernels then round, see
            ``rounds_product``; the canonical form of decoders has it so.
    """

    def __init__(self, *, decoder: bool = True) -> None:
        super().__init__()
        self._decoder = decoder

    def rewrite(self, graph: ir.Graph) -> None:
        """Traverse the graph once downstream, and once upstream."""
        for node in list(graph):
            if _is(node, _QUANTIZE):
                self._cancel(graph, node)
            elif node.op_type in MOVERS and not node.domain:
                self._sink(graph, node)
        pending = [node for node in graph if _is(node, _QUANTIZE)]
        while pending:
            pending += self._hoist(graph, pending.pop())

    def _cancel(self, graph: ir.Graph, node: ir.Node) -> None:
        inner = _producer(graph, node.inputs[0], _DEQUANTIZE)
        source = None if inner is None else inner.inputs[0]
        if inner is None or source is None:
            return
        reason = _does_not_cancel(inner, node)
        if reason is None and node.outputs[0].is_graph_output() and not can_return(graph, source):
            reason = "it computes a graph output that its source cannot become"
        if reason is not None:
            self.refuse(node, reason)
            return
        replace(node.outputs[0], source)
        remove_unused(graph, node)
        self.fired += 1

    def _sink(self, graph: ir.Graph, node: ir.Node) -> None:
        """Move the DequantizeLinear of a node's operands to the node's outputs."""
        values = node.inputs if node.op_type == "Concat" else node.inputs[:1]
        producers = [_producer(graph, value, _DEQUANTIZE) for value in values]
        if not any(producers) or _is_lookup(node, producers[0]):
            return
        operands = [None if inner is None else _dequantized(graph, inner) for inner in producers]
        reason = _sink_refusal(node, operands)
        if reason is None and not self._decoder and rounds_product(values[0], node.outputs[0]):
            reason = ROUNDS_PRODUCT
        if reason is not None:
            self.refuse(node, reason)
            return
        given = [operand for operand in operands if isinstance(operand, _Dequantized)]
        self._rewrite(graph, node, given)

    def _rewrite(self, graph: ir.Graph, node: ir.Node, dequantized: Sequence[_Dequantized]) -> None:
        pair = all(operand.quantize is not None for operand in dequantized)
        sources = [operand.source(pair=pair) for operand in dequantized]
        moved = _copy(node, [*sources, *node.inputs[len(sources) :]])
        kinds = [_QUANTIZE, _DEQUANTIZE] if pair else [_DEQUANTIZE]
        found = dequantized[0].found
        axis = None if found.axis is None else moved_axis(node, found.axis)
        for old, new in zip(node.outputs, moved.outputs, strict=True):
            if not old.uses() and not old.is_graph_output():
                continue
            new.type = sources[0].type if sources[0] is not None else None
            new.shape = old.shape
            for kind in kinds:
                models = [operand.quantize if kind == _QUANTIZE else operand.node for operand in dequantized]
                new = _quantizer(node, models[0], kind, new, axis)
            replace(old, new)
        remove_unused(graph, node)
        self.fired += 1

    def _hoist(self, graph: ir.Graph, node: ir.Node) -> list[ir.Node]:
        """Move a QuantizeLinear in front of the mover before it, and return the new QuantizeLinear nodes."""
        mover = None if node.inputs[0] is None else node.inputs[0].producer()
        if mover is None or mover.graph is not graph or mover.domain or mover.op_type not in _SAME_SIZE:
            return []
        if any(use.node.op_type == _DEQUANTIZE for use in node.outputs[0].uses()):
            return []
        quantization = parameters(node)
        reason = quantization if isinstance(quantization, str) else _hoist_refusal(mover, node, quantization)
        if reason is not None or isinstance(quantization, str):
            self.refuse(node, str(reason))
            return []
        axis = None if quantization.axis is None else moved_axis(mover, quantization.axis, backward=True)
        count = len(mover.inputs) if mover.op_type == "Concat" else 1
        sources = [_quantizer(node, node, _QUANTIZE, value, axis) for value in mover.inputs[:count] if value]
        moved = _copy(mover, [*sources, *mover.inputs[count:]], before=node)
        moved.outputs[0].type, moved.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
        replace(node.outputs[0], moved.outputs[0])
        remove_unused(graph, node)
        self.fired += 1
        return [made for made in map(ir.Value.producer, sources) if made is not None]


def _does_not_cancel(before: ir.Node, after: ir.Node) -> str | None:
    """Return why QuantizeLinear(DequantizeLinear(x)) may differ from x, None if it is x."""
    old, new = parameters(before), parameters(after)
    if isinstance(old, str) or isinstance(new, str):
        return old if isinstance(old, str) else str(new)
    return (
        new.loses_digits()
        if old.equals(new)
        else "its parameters differ from those of the DequantizeLinear before it"
    )


def _hoist_refusal(mover: ir.Node, node: ir.Node, quantization: Parameters) -> str | None:
    """Return why a QuantizeLinear cannot be moved in front of ``mover``, None if it can."""
    if sole_consumer(mover.outputs[0]) is not node:
        return f"the result of {mover.op_type} has other consumers"
    if quantization.axis is not None and moved_axis(mover, quantization.axis, backward=True) is None:
        return _axis_changes(mover)
    return cannot_move(mover, quantization)


def _sink_refusal(node: ir.Node, operands: Sequence[_Dequantized | str | None]) -> str | None:
    """Return why the DequantizeLinear of a node's operands cannot be moved behind it, None if it can."""
    first = operands[0]
    for operand in operands:
        if isinstance(operand, str):
            return operand
        if operand is None or not isinstance(first, _Dequantized):
            return "some of its operands are not dequantized"
        if sole_consumer(operand.node.outputs[0]) is not node:
            return "its dequantized operand has other consumers"
        if not first.found.equals(operand.found):
            return "its operands have different quantization parameters"
        if _is_stored(operand.node) and (node.op_type != "Transpose" or operand.found.dtype not in _FOLDABLE):
            return "its operand is a weight, which must be dequantized at its consumer"
    if not isinstance(first, _Dequantized):
        return None
    if first.found.axis is not None and moved_axis(node, first.found.axis) is None:
        return _axis_changes(node)
    if any(joins_pairs(first.node.outputs[0], output) for output in node.outputs):
        return JOINS_PAIRS
    return cannot_move(node, first.found)


def _is_lookup(node: ir.Node, table: ir.Node | None) -> bool:
    """Return whether a node gathers rows of a constant; its portable form dequantizes the whole table."""
    return node.op_type == "Gather" and table is not None and _is_stored(table)


_FOLDABLE = (ir.DataType.INT8, ir.DataType.UINT8)


def _axis_changes(node: ir.Node) -> str:
    return f"{node.op_type} changes the axis of its scales"


def _is_stored(node: ir.Node) -> bool:
    source = node.inputs[0]
    return source is not None and ir.convenience.get_const_tensor(source) is not None


def _dequantized(graph: ir.Graph, node: ir.Node) -> _Dequantized | str:
    quantization = parameters(node)
    if isinstance(quantization, str):
        return quantization
    inner = _producer(graph, node.inputs[0], _QUANTIZE)
    if inner is None or sole_consumer(inner.outputs[0]) is not node:
        return _Dequantized(node, quantization, None)
    before = parameters(inner)
    same = isinstance(before, Parameters) and before.equals(quantization)
    return _Dequantized(node, quantization, inner if same else None)


def _producer(graph: ir.Graph, value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.graph is graph and _is(node, op_type) else None


def _is(node: ir.Node, op_type: str) -> bool:
    return node.op_type == op_type and not node.domain


def _copy(node: ir.Node, inputs: Sequence[ir.Value | None], before: ir.Node | None = None) -> ir.Node:
    """Insert a copy of ``node`` with other inputs."""
    made = insert(before or node, node.op_type, inputs, node.attributes, num_outputs=len(node.outputs))
    made.name = node.name
    return made


def _quantizer(
    before: ir.Node, model: ir.Node | None, op_type: str, value: ir.Value, axis: int | None
) -> ir.Value:
    """Insert a QuantizeLinear or DequantizeLinear with the parameters of ``model``, and return its result."""
    if model is None:
        raise TypeError(f"no {op_type} to copy the parameters from")
    attributes = dict(model.attributes) | ({} if axis is None else {"axis": ir.AttrInt64("axis", axis)})
    made = insert(before, op_type, [value, *model.inputs[1:]], attributes)
    made.name, result = model.name, made.outputs[0]
    result.type, result.shape = model.outputs[0].type, value.shape
    return result
