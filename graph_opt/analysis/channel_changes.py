"""Recognise operators that multiply each channel by a constant or add a constant to it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...records import dataclass
from ..graph.edit import constant, float_attribute, int_attribute, weight
from ..graph.lazy import shape_of

Vector = npt.NDArray[np.float64]
_BEFORE_CHANNELS = 1  # axes in front of the channel axis of a BatchNormalization


@dataclass(frozen=True, slots=True)
class Channels:
    """The channel axis of a value.

    Attributes:
        count: number of channels.
        behind: number of axes after the channel axis.
        rank: minimum number of axes of the value.
    """

    count: int
    behind: int
    rank: int

    def vector(self, value: ir.Value | None) -> Vector | None:
        """Return a constant as one number per channel; None if it varies or broadcasts along other axes."""
        tensor = weight(value)
        if tensor is None or tensor.size not in (1, self.count):
            return None
        shape = shape_of(tensor)
        place = len(shape) - 1 - self.behind
        along_channels = place >= 0 and shape[place] == tensor.size
        if len(shape) > self.rank or not (tensor.size == 1 or along_channels):
            return None
        return np.resize(tensor.numpy().astype(np.float64), self.count)


def change_of_channels(node: ir.Node, value: ir.Value, channels: Channels) -> tuple[Vector, Vector] | None:
    """Return factor and term, [channels] each, of a node that computes value * factor + term, else None."""
    if node.domain:
        return None
    if node.op_type == "BatchNormalization":
        return _normalization(node, channels) if node.inputs[0] is value else None
    if node.op_type not in ("Add", "Sub", "Mul", "Div"):
        return None
    first = node.inputs[0] is value
    numbers = channels.vector(node.inputs[1] if first else node.inputs[0])
    if numbers is None:
        return None
    one, zero = np.ones(channels.count), np.zeros(channels.count)
    match node.op_type:
        case "Add":
            return one, numbers
        case "Sub":
            return (one, -numbers) if first else (-one, numbers)
        case "Mul":
            return numbers, zero
        case _:
            return (1 / numbers, zero) if first and numbers.all() else None


def _normalization(node: ir.Node, channels: Channels) -> tuple[Vector, Vector] | None:
    if int_attribute(node, "training_mode", 0) or channels.rank - channels.behind != _BEFORE_CHANNELS + 1:
        return None  # the channel axis of BatchNormalization is always 1
    contents = [constant(value) for value in node.inputs[1:5]]
    if any(content is None or content.shape != (channels.count,) for content in contents):
        return None
    scale, shift, mean, variance = (np.asarray(content, np.float64) for content in contents)
    factors = scale / np.sqrt(variance + float_attribute(node, "epsilon", 1e-5))
    return factors, shift - mean * factors
