"""Fuse RMSNormalization(x - mean(x)), with an optional bias, into LayerNormalization.

Ba et al., "Layer Normalization" (2016). ``FuseRMSNormPass`` must run before.
"""

from __future__ import annotations

import onnx_ir as ir

from ...graph.edit import (
    constant,
    float_attribute,
    insert,
    int_attribute,
    nodes_of,
    remove_unused,
    replace,
    sole_consumer,
    weight,
)
from ...graph.lazy import shape_of
from ..base import GraphPass


class FuseLayerNormPass(GraphPass):
    """Fuse the subtraction of the mean, the norm and the bias."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Try every RMSNormalization of a difference."""
        for node in nodes_of(graph, "RMSNormalization"):
            x = _centred(node.inputs[0])
            rank = len(x.shape) if x is not None and x.shape is not None else 0
            if x is None or int_attribute(node, "axis", -1) not in (-1, rank - 1):
                continue
            operands, output = _biased(node, [x, *node.inputs[1:2]])
            attributes = {"axis": -1, "epsilon": float_attribute(node, "epsilon", 1e-5)}
            anchor = output.producer()
            if anchor is None:
                raise AssertionError("unreachable: the output of a norm has a producer")
            fused = insert(anchor, "LayerNormalization", operands, attributes)
            fused.name = node.name
            replace(output, fused.outputs[0])
            remove_unused(graph, anchor)
            self.fired += 1


def _centred(value: ir.Value | None) -> ir.Value | None:
    """Return x if ``value`` is x - mean(x) over the last axis, else None."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Sub" or node.domain:
        return None
    x, subtracted = node.inputs
    mean = subtracted.producer() if subtracted is not None else None
    if mean is None or mean.op_type != "ReduceMean" or mean.domain or mean.inputs[0] is not x:
        return None
    axes = constant(mean.inputs[1]) if len(mean.inputs) > 1 else None
    if x is None or x.shape is None or axes is None or not int_attribute(mean, "keepdims", 1):
        return None
    return x if axes.reshape(-1).tolist() in ([-1], [len(x.shape) - 1]) else None


def _biased(node: ir.Node, operands: list[ir.Value | None]) -> tuple[list[ir.Value | None], ir.Value]:
    """Return the operands, with the bias if one is added after the norm, and the last output."""
    output, scale = node.outputs[0], weight(node.inputs[1])
    reader = sole_consumer(output)
    if reader is not None and reader.op_type == "Add" and not reader.domain and scale is not None:
        for operand in reader.inputs:
            tensor = weight(operand)
            if tensor is not None and shape_of(tensor) == shape_of(scale):
                return [*operands, operand], reader.outputs[0]
    return operands, output
