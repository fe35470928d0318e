"""Merge matrix products of one input into one product with concatenated weights, and a Split.

q, k and v become one kernel call, and so do gate and up. Biases are merged too. Weights may be float or
blocked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ....records import dataclass
from ...graph.edit import MICROSOFT, OWN, add_initializer, insert, nodes_of, remove_unused, replace, weight
from ...graph.lazy import concat_last, shape_of, stored_blocks
from ...passes.base import GraphPass
from .block_minima import weight_with_minima, write_weight_with_minima
from .blocked_weight import BlockedWeight, blocked_weight

_ATTENTIONS = ("GroupQueryAttention", "PagedAttention")  # their first inputs are q, k and v


@dataclass(frozen=True, slots=True)
class Projection:
    """The parts of x @ W (+ bias): minima of blocks are the last tensor; ``output`` includes the bias."""

    product: ir.Node
    blocked: BlockedWeight | None
    tensors: tuple[ir.Value, ...]
    bias: ir.Value | None
    output: ir.Value
    has_minima: bool = False

    @property
    def size(self) -> int:
        """Number of output features."""
        return shape_of(_content(self.tensors[0]))[1]

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that is equal for weights that can be concatenated."""
        first = _content(self.tensors[0])
        block_size = self.blocked.block_size if self.blocked is not None else 0
        stored = stored_blocks(first)
        stored_type = None if stored is None else stored.type_name
        return first.dtype, block_size, len(self.tensors), self.has_minima, self.bias is None, stored_type


class MergeProjectionsPass(GraphPass):
    """Merge the matrix products that read one value."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Merge every two or more products whose weights have the same kind."""
        groups: dict[ir.Value, list[Projection]] = defaultdict(list)
        places = {node: place for place, node in enumerate(graph)}  # of thousands in mixtures
        for node in nodes_of(graph, "MatMul"):
            matmul = _projection(node)
            if isinstance(matmul, str):
                self.refuse(node, matmul)
            elif matmul is not None and node.inputs[0] is not None:
                groups[node.inputs[0]].append(matmul)
        for x, group in groups.items():
            kinds: dict[tuple[object, ...], list[Projection]] = defaultdict(list)
            for projection in group:
                kinds[projection.kind].append(projection)
            alike = [some for some in kinds.values() if len(some) > 1]
            if len(group) > 1 and not alike:
                self.refuse(
                    group[0].product,
                    "the products of its input differ in weight type, block size or bias",
                )
            for some in alike:
                first = min((one.product for one in some), key=places.__getitem__)
                _merge(graph, x, sorted(some, key=_operand_order), first)
                self.fired += 1


class PackedQKVPass(GraphPass):
    """Rewrite attention of Split(x) as attention of x, which the kernel splits itself."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite every attention whose q, k and v are the outputs of one Split."""
        found = [node for kind in _ATTENTIONS for node in nodes_of(graph, kind, MICROSOFT)]
        for node in [*found, *nodes_of(graph, "PagedAttention", OWN)]:
            squeezes = [_squeeze(value) for value in node.inputs[:3]]
            parts = list(node.inputs[:3]) if None in squeezes else [one.inputs[0] for one in squeezes if one]
            split = parts[0].producer() if parts[0] is not None else None
            if split is None or split.op_type != "Split" or list(split.outputs) != parts:
                continue
            if any(len(output.uses()) != 1 for output in split.outputs):
                self.refuse(node, "q, k or v has other consumers")
                continue
            packed = split.inputs[0]
            if squeezes[0] is not None and packed is not None:
                packed = insert(node, "Squeeze", [packed, squeezes[0].inputs[1]]).outputs[0]
            for position, part in enumerate((packed, None, None)):
                old = node.inputs[position]
                node.replace_input_with(position, part)
                remove_unused(graph, old.producer() if old is not None else None)
            self.fired += 1


def _squeeze(value: ir.Value | None) -> ir.Node | None:
    """Return the Squeeze that computes a value, with axes from an input; else None."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == "Squeeze" and len(node.inputs) > 1 else None


def _projection(node: ir.Node) -> Projection | str | None:
    """Return a product with a weight, why it cannot be merged, or None for a product of two activations."""
    added = weight_with_minima(node.inputs[1])
    blocked = blocked_weight(node.inputs[1]) if added is None else added.blocked
    if isinstance(blocked, str):
        return blocked
    source = node.inputs[1]
    operands = [source] if blocked is None else [value for value in blocked.node.inputs if value is not None]
    operands += [] if added is None else [added.minima]
    tensors = tuple(value for value in operands if value is not None and weight(value) is not None)
    if source is None or not tensors or len(_content(tensors[0]).shape) != 2:
        return None
    if any(len(value.uses()) > 1 for value in (source, *tensors)):
        return "its weight has other consumers"
    columns = shape_of(_content(tensors[0]))[1]
    if blocked is not None and (blocked.axis != 0 or (blocked.bits == 4 and columns % 2)):
        return (
            "weights can be merged if blocked along their inputs, 4-bit ones with an even number of outputs"
        )
    output = node.outputs[0]
    uses = list(output.uses())
    if len(uses) == 1 and uses[0].node.op_type == "Add" and not output.is_graph_output():
        bias = uses[0].node.inputs[1 - uses[0].idx]
        tensor = weight(bias)
        if tensor is not None and shape_of(tensor) == (columns,):
            return Projection(node, blocked, tensors, bias, uses[0].node.outputs[0], added is not None)
    return Projection(node, blocked, tensors, None, output, added is not None)


def _operand_order(projection: Projection) -> int:
    """Return a sort key that orders q, k and v of one attention; all others are equal."""
    squeezed = [use.node.outputs[0] for use in projection.output.uses() if use.node.op_type == "Squeeze"]
    uses = [use for value in (projection.output, *squeezed) for use in value.uses()]
    readers = (use for use in uses if use.node.op_type in _ATTENTIONS)
    reader = next(readers, None)
    return reader.idx if reader is not None else 0


def _merge(graph: ir.Graph, x: ir.Value, group: Sequence[Projection], anchor: ir.Node) -> None:
    """Merge products in the order of their results, in front of the node ``anchor``."""
    merged = [_concatenated(graph, values) for values in zip(*(one.tensors for one in group), strict=True)]
    right = merged[0]
    blocked = group[0].blocked
    if blocked is not None:
        attributes = {"axis": 0, "block_size": blocked.block_size}
        minima = merged.pop() if group[0].has_minima else None
        right = insert(anchor, "DequantizeLinear", merged, attributes).outputs[0]
        if minima is not None:
            right = write_weight_with_minima(graph, anchor, right, minima, 0, blocked.block_size)
    output = insert(anchor, "MatMul", [x, right]).outputs[0]
    biases = [projection.bias for projection in group if projection.bias is not None]
    if biases:
        output = insert(anchor, "Add", [output, _concatenated(graph, biases)]).outputs[0]
    sizes = np.array([projection.size for projection in group], np.int64)
    split_sizes = add_initializer(graph, f"{right.name}.sizes", sizes)
    parts = insert(anchor, "Split", [output, split_sizes], {"axis": -1}, num_outputs=len(group)).outputs
    for projection, part in zip(group, parts, strict=True):
        replace(projection.output, part)
        remove_unused(graph, projection.output.producer())


def _concatenated(graph: ir.Graph, values: Sequence[ir.Value]) -> ir.Value:
    return add_initializer(graph, _joint_name(values), concat_last([_content(value) for value in values]))


def _joint_name(values: Sequence[ir.Value]) -> str:
    """Join names by the parts that differ: a.q_proj.weight, a.k_proj.weight become a.q_proj+k_proj.weight."""
    parts = [str(value.name).split(".") for value in values]
    if len({len(part) for part in parts}) > 1:
        return "+".join(".".join(part) for part in parts)
    columns = [list(dict.fromkeys(column)) for column in zip(*parts, strict=True)]
    return ".".join("+".join(column) for column in columns)


def _content(value: ir.Value) -> ir.TensorProtocol:
    tensor = weight(value)
    if tensor is None:
        raise AssertionError(f"unreachable: {value.name} was checked to be a weight")
    return tensor
