"""Fold per-channel scaling behind a convolution, such as batch normalization, into its weight and bias.

Otherwise weights would be quantized at scales that the batch norm changes again. B. Jacob et al.,
https://arxiv.org/abs/1712.05877, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...graph.edit import (
    add_initializer,
    constant,
    float_attribute,
    int_attribute,
    remove_unused,
    replace,
    sole_consumer,
    weight,
)
from ...graph.lazy import Array, lazy, shape_of
from ...passes.base import GraphPass

Reals = npt.NDArray[np.float64]
_FLOAT = ir.DataType.FLOAT


class FoldAffinePass(GraphPass):
    """Fold BatchNormalization, and arithmetic with a constant per channel, into the convolution before it."""

    oldest_opset: ClassVar[int] = 13  # that of DequantizeLinear with a scale a channel

    def rewrite(self, graph: ir.Graph) -> None:
        """Fold the nodes behind each convolution one by one."""
        for node in list(graph):
            if node.op_type != "Conv" or node.domain or not _has_own_weight(node):
                continue
            while (reader := sole_consumer(node.outputs[0])) is not None:
                channels = shape_of(node.inputs[1].const_value)[0]  # type: ignore[union-attr,arg-type]
                found = _affine(reader, node.outputs[0], channels)
                if found is None:
                    break
                _scale(graph, node, *found)
                replace(reader.outputs[0], node.outputs[0])
                remove_unused(graph, reader)
                self.fired += 1


def _has_own_weight(node: ir.Node) -> bool:
    factor, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    tensor = weight(factor)
    if factor is None or tensor is None or tensor.dtype != _FLOAT or len(list(factor.uses())) > 1:
        return False
    return bias is None or weight(bias) is not None


def _affine(reader: ir.Node, value: ir.Value, channels: int) -> tuple[Reals, Reals] | None:
    """Return factor and shift [channels] of a node that computes value * factor + shift, else None."""
    if reader.domain:
        return None
    if reader.op_type == "BatchNormalization":
        return _batch_norm(reader)
    if reader.op_type not in ("Add", "Div", "Mul", "Sub") or len(reader.inputs) != 2:
        return None
    position = 1 if reader.inputs[0] is value else 0
    if position == 0 and reader.op_type in ("Div", "Sub"):
        return None
    operand = _by_channel(reader.inputs[position], value, channels)
    if operand is None or (reader.op_type == "Div" and not operand.all()):
        return None
    one, zero = np.ones(channels), np.zeros(channels)
    if reader.op_type in ("Add", "Sub"):
        return one, operand if reader.op_type == "Add" else -operand
    return (operand if reader.op_type == "Mul" else one / operand), zero


def _by_channel(operand: ir.Value | None, value: ir.Value, channels: int) -> Reals | None:
    """Return a constant with one value per channel, [channels], else None."""
    content, rank = constant(operand), len(value.shape or ())
    if content is None or operand is None or operand.is_graph_input() or content.dtype.kind != "f":
        return None
    if content.size == 1 and content.ndim <= max(rank, 1):
        return np.full(channels, float(content.reshape(-1)[0]))
    if rank < 3 or content.ndim not in (rank - 1, rank):
        return None
    wanted = (channels, *[1] * (rank - 2))
    fits = content.shape[-len(wanted) :] == wanted and content.size == channels
    return content.reshape(-1).astype(np.float64) if fits else None


def _batch_norm(node: ir.Node) -> tuple[Reals, Reals] | None:
    parameters = [constant(value) for value in node.inputs[1:5]]
    used = [output for output in node.outputs[1:] if output.uses() or output.is_graph_output()]
    if used or int_attribute(node, "training_mode", 0) or len(parameters) < 4:
        return None
    if any(one is None or one.dtype != np.float32 for one in parameters):
        return None
    gain, shift, mean, variance = (np.asarray(one, np.float64) for one in parameters)
    factor = gain / np.sqrt(variance + float_attribute(node, "epsilon", 1e-5))
    return factor, shift - mean * factor


def _scale(graph: ir.Graph, node: ir.Node, factor: Reals, shift: Reals) -> None:
    """Replace a convolution's weight by weight * factor and its bias by bias * factor + shift."""
    source, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    tensor, old = weight(source), weight(bias)
    if source is None or tensor is None:
        return
    name, shape = str(source.name), shape_of(tensor)
    if not np.array_equal(factor, np.ones_like(factor)):
        graph.initializers.pop(name)
        node.replace_input_with(1, add_initializer(graph, name, lazy(_scaled(tensor, factor), _FLOAT, shape)))
    before = np.zeros(len(factor)) if old is None else np.asarray(old.numpy(), np.float64)
    moved = (before * factor + shift).astype(np.float32)
    if bias is None and not moved.any():
        return
    called = f"{name}.bias" if bias is None else str(bias.name)
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(2, None)
    if bias is not None and not bias.uses() and bias.graph is graph:
        graph.initializers.pop(called)
    node.replace_input_with(2, add_initializer(graph, called, moved))


def _scaled(tensor: ir.TensorProtocol, factor: Reals) -> Callable[[], Array]:
    def compute() -> Array:
        content = tensor.numpy()
        return (content * factor.reshape(-1, *[1] * (content.ndim - 1))).astype(np.float32)

    return compute
