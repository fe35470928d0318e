"""Scales and minima of quantized weights that a file stores in 16 bits.

In memory a scale is a float32 initializer, as ``MatMulNBits`` takes it. In a package it is a float16 or
bfloat16 initializer before a ``Cast`` to float32: with blocks of 32, half a bit less for each weight. The
values are equal: quantization rounds them to float16 first, and imported checkpoints store them in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from .edit import int_attribute, nodes_of, weight
from .lazy import shape_of

GROUP_SIZE = "group_size"  # in `meta` of scales that are not computed yet: inputs whose scales have one unit
_SCALE = 1  # the input of DequantizeLinear
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class Widened(ir.LazyTensor):
    """The float32 values of a float16 or bfloat16 tensor.

    Args:
        half: the tensor to store.
    """

    def __init__(self, half: ir.TensorProtocol) -> None:
        self.half = half
        shape = ir.Shape(shape_of(half))
        super().__init__(
            lambda: ir.Tensor(half.numpy().astype(np.float32)), dtype=ir.DataType.FLOAT, shape=shape
        )


def widen_scales(model: ir.Model) -> None:
    """Replace every ``Cast`` of a stored 16-bit scale by a float32 initializer; no data is read."""
    for graph in model.graphs():
        _remove_casts(graph, [cast for cast in nodes_of(graph, "Cast") if _widens_scale(cast)])


@contextmanager
def narrowed_scales(model: ir.Model) -> Iterator[None]:
    """Within the block, scales that are ``Widened`` are 16-bit initializers before a ``Cast``."""
    changed = [(graph, _narrow(graph)) for graph in model.graphs()]
    try:
        yield
    finally:
        for graph, casts in changed:
            _remove_casts(graph, casts)


def _widens_scale(cast: ir.Node) -> bool:
    stored, scale = cast.inputs[0], cast.outputs[0]
    half = weight(stored)
    if stored is None or half is None or len(stored.uses()) > 1:
        return False
    if half.dtype not in _HALVES or not _only_scales(scale):
        return False
    return int_attribute(cast, "to", 0) == ir.DataType.FLOAT and not scale.is_graph_output()


def _only_scales(value: ir.Value) -> bool:
    """Return whether all uses of ``value`` are as scales, or as minima that are added to blocks."""
    uses = value.uses()
    return bool(uses) and all(
        use.idx == _SCALE and (use.node.op_type == "DequantizeLinear" or _adds_minima(use.node))
        for use in uses
    )


def _adds_minima(node: ir.Node) -> bool:
    """Return whether ``node`` is Add(Reshape(DequantizeLinear(...)), minima)."""
    blocks = node.inputs[0].producer() if node.op_type == "Add" and node.inputs[0] is not None else None
    if blocks is None or blocks.op_type != "Reshape" or blocks.inputs[0] is None:
        return False
    dequantize = blocks.inputs[0].producer()
    return dequantize is not None and dequantize.op_type == "DequantizeLinear"


def _remove_casts(graph: ir.Graph, casts: Iterable[ir.Node]) -> None:
    """Replace casts of initializers by initializers with the names of their results."""
    exchanged: dict[ir.Value, ir.Value] = {}
    for cast in casts:
        stored, old, half = cast.inputs[0], cast.outputs[0], weight(cast.inputs[0])
        assert stored is not None  # noqa: S101 -- the callers chose such casts
        assert half is not None  # noqa: S101
        wide = _value(str(old.name), Widened(half))
        for use in list(old.uses()):
            use.node.replace_input_with(use.idx, wide)
        graph.remove(cast, safe=True)
        exchanged[stored] = wide
    _exchange(graph, exchanged)


def _narrow(graph: ir.Graph) -> list[ir.Node]:
    casts, exchanged = [], dict[ir.Value, ir.Value]()
    for wide in list(graph.initializers.values()):
        tensor = wide.const_value
        if not isinstance(tensor, Widened) or wide.is_graph_output() or not _only_scales(wide):
            continue
        users = [(use.node, use.idx) for use in wide.uses()]
        stored = _value(f"{wide.name}.{tensor.half.dtype.name.lower()}", tensor.half)
        cast = ir.node("Cast", [stored], {"to": ir.DataType.FLOAT})
        graph.insert_before(next(node for node in graph if any(node is user for user, _ in users)), cast)
        for node, index in users:
            node.replace_input_with(index, cast.outputs[0])
        exchanged[wide] = stored
        casts.append(cast)
    _exchange(graph, exchanged)
    for wide, cast in zip(exchanged, casts, strict=True):
        cast.outputs[0].name = wide.name
    return casts


def _value(name: str, tensor: ir.TensorProtocol) -> ir.Value:
    tensor.name = name
    shape = ir.Shape(shape_of(tensor))
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)


def _exchange(graph: ir.Graph, exchanged: Mapping[ir.Value, ir.Value]) -> None:
    """Replace initializers, each in its place: threads that write them rely on their order."""
    if not exchanged:
        return
    order = [exchanged.get(value, value) for value in graph.initializers.values()]
    graph.initializers.clear()
    for value in order:
        graph.register_initializer(value)
