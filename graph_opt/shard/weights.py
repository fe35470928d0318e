"""Cut weights: lazily, and quantized ones with their scales."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...errors import GraphError
from ..graph.edit import add_initializer, constant, insert, int_attribute, shared_constant, weight
from ..graph.lazy import lazy, pack_nibbles, packed_bytes, shape_of, unpack_nibbles, with_halves
from .cuts import Cut, Indices, reshaped

_OF_EACH = frozenset({"Cast", "Identity"})


def take(tensor: ir.TensorProtocol, indices: Indices, axis: int) -> ir.TensorProtocol:
    """Return a lazy tensor of some elements of an axis.

    Args:
        tensor: any tensor; it is read whenever the result is, and not kept.
        indices: elements of the axis, in the order of the result.
        axis: counted from the end.
    """
    shape = list(shape_of(tensor))
    shape[axis] = len(indices)
    if tensor.dtype.bitwidth == 4:

        def nibbles() -> np.ndarray:
            whole = unpack_nibbles(packed_bytes(tensor), shape_of(tensor))
            return pack_nibbles(np.take(whole, indices, axis).reshape(-1))

        return lazy(nibbles, tensor.dtype, shape)
    part = lazy(lambda: np.take(tensor.numpy(), indices, axis), tensor.dtype, shape)
    return with_halves(part, tensor, lambda array: np.take(array, indices, axis))


class WeightCuts:
    """Weights of a graph, and parts of them for one rank.

    Args:
        graph: initializers are added to it.
        rank: the rank whose parts are made.
    """

    def __init__(self, graph: ir.Graph, rank: int) -> None:
        self._graph = graph
        self._rank = rank
        self._known: dict[ir.Value, tuple[int, ...] | None] = {}
        self._made: dict[tuple[ir.Value, Cut], ir.Value] = {}

    def shape(self, value: ir.Value | None) -> tuple[int, ...] | None:
        """Return the shape of a weight, also of one that is dequantized; None if ``value`` is none."""
        if value is None:
            return None
        if value not in self._known:
            self._known[value] = self._shape(value)
        return self._known[value]

    def block(self, value: ir.Value, axis: int) -> int:
        """Return how many elements of an axis, counted from the end, have one scale; 1 if each its own."""
        node, shape = _dequantizer(value), self.shape(value)
        if node is None or shape is None:
            return 1
        same = int_attribute(node, "axis", 1) % len(shape) == axis % len(shape)
        return (int_attribute(node, "block_size", 0) or 1) if same else 1

    def quantized(self, value: ir.Value) -> bool:
        """Return whether a weight is dequantized, so that kernels may round what it multiplies."""
        return _dequantizer(value) is not None

    def fits(self, value: ir.Value, cut: Cut) -> bool:
        """Return whether a weight can be cut so; a quantized one only between its blocks."""
        return _whole_blocks(cut, self.block(value, cut.axis))

    def part(self, value: ir.Value, cut: Cut, before: ir.Node) -> ir.Value:
        """Return this rank's part of a weight.

        Args:
            value: the weight, an initializer or computed from initializers.
            cut: of one of its axes.
            before: the node that will read it.
        """
        known = (value, cut)
        if known not in self._made:
            self._made[known] = self._part(value, cut, before)
        return self._made[known]

    def _shape(self, value: ir.Value) -> tuple[int, ...] | None:
        tensor = weight(value)
        if tensor is not None:
            return shape_of(tensor)
        node = value.producer()
        if node is not None and node.op_type == "Reshape" and self.shape(node.inputs[0]) is not None:
            target = constant(node.inputs[1])
            return None if target is None or (target < 1).any() else tuple(map(int, target))
        if node is not None and node.op_type in (*_OF_EACH, "Add", "DequantizeLinear"):
            shapes = [self.shape(operand) for operand in node.inputs if operand is not None]
            return shapes[0] if None not in shapes else None
        return None

    def _part(self, value: ir.Value, cut: Cut, before: ir.Node) -> ir.Value:
        tensor = weight(value)
        if tensor is not None:
            return add_initializer(
                self._graph, f"{value.name}.part", take(tensor, cut.indices(self._rank), cut.axis)
            )
        node = value.producer()
        if node is None:
            raise GraphError(f"the weight {value.name} cannot be cut: it is computed from no weight")
        # A weight may be computed from stored ones, such as levels, scales and minima. The nodes are written
        # again for this rank in front of ``before``, on cut inputs, instead of cutting the result: so a rank
        # never holds the whole weight, and quantized ones stay quantized.
        attributes = dict(node.attributes.items())
        own = cut if node.op_type != "Reshape" else self._reshaped(node, cut)
        inputs = [self.part(value, own, before) if value is not None else None for value in node.inputs[:1]]
        if node.op_type == "DequantizeLinear":
            inputs += self._scales(node, cut, before)
        elif node.op_type == "Add" and node.inputs[1] is not None:
            inputs.append(self.part(node.inputs[1], cut, before))
        elif node.op_type == "Reshape":
            target = list(self.shape(value) or ())
            target[cut.axis] = cut.local(self._rank)
            name = f"shard.{'_'.join(map(str, target))}"
            inputs.append(shared_constant(self._graph, name, np.array(target, np.int64)))
        made = insert(before, node.op_type, inputs, domain=node.domain)
        made.attributes.update(attributes)
        made.name = f"{node.name}.part"
        result = made.outputs[0]
        result.name, result.type = f"{value.name}.part", value.type
        sizes = list(self.shape(value) or ())
        sizes[cut.axis] = cut.local(self._rank)
        result.shape = ir.Shape(sizes)
        return result

    def _reshaped(self, node: ir.Node, cut: Cut) -> Cut:
        """Return the cut of what a weight with minima is a reshape of."""
        before = reshaped(cut, self.shape(node.outputs[0]) or (), self.shape(node.inputs[0]) or ())
        if before is None:
            raise GraphError(f"the weight {node.outputs[0].name} cannot be cut within its blocks")
        return before

    def _scales(self, node: ir.Node, cut: Cut, before: ir.Node) -> list[ir.Value | None]:
        """Return the parts of scale and zero point."""
        shape, block = self.shape(node.inputs[0]) or (), int_attribute(node, "block_size", 0)
        on_axis = int_attribute(node, "axis", 1) % max(len(shape), 1) - len(shape) == cut.axis
        own: Cut | None = cut
        if block and on_axis:
            if not _whole_blocks(cut, block):
                raise GraphError(
                    f"{node.op_type} {node.name} has blocks of {block} weights, which cuts divide"
                )
            own = cut.mapped(lambda part: part[::block] // block, cut.axis, -(-cut.size // block))
        parts: list[ir.Value | None] = []
        for value in node.inputs[1:]:
            sizes = self.shape(value) or ()
            if value is None or not sizes or (len(sizes) == 1 and not on_axis):
                parts.append(value)
            elif own is not None:
                parts.append(self.part(value, own.moved(-1) if len(sizes) == 1 else own, before))
        return parts


def _dequantizer(value: ir.Value) -> ir.Node | None:
    """Return the node that dequantizes a weight; None if there is none."""
    node = value.producer()
    while node is not None and node.op_type != "DequantizeLinear":
        if node.op_type not in (*_OF_EACH, "Reshape", "Add") or node.inputs[0] is None:
            return None
        node = node.inputs[0].producer()
    return node


def _whole_blocks(cut: Cut, block: int) -> bool:
    """Return whether each rank holds whole blocks."""
    return all(bound % block == 0 or bound == cut.size for runs in cut.parts for run in runs for bound in run)
