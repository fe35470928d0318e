"""Write pools that round up their size so that no window begins in the padding behind the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

from ...graph.edit import int_attribute, static_size, text_attribute
from ..base import EveryGraphPass

_POOLS = ("MaxPool", "AveragePool", "LpPool")
_LEADING_AXES = 2  # batch and channels


class WholeWindowsPass(EveryGraphPass):
    """Write pools with ``ceil_mode`` without windows that would begin in the padding behind the input.

    Such windows are left out (opset 22), and kernels have always done so. But shape inference of older opsets
    counts them, and onnxruntime refuses a graph whose recorded shapes are the right ones.
    """

    def rewrite(self, graph: ir.Graph) -> None:
        """Try every pool."""
        for node in graph:
            if node.op_type in _POOLS and not node.domain and int_attribute(node, "ceil_mode", 0):
                self._rewrite(node)

    def _rewrite(self, node: ir.Node) -> None:
        """Without ``ceil_mode``, or without the padding that only such windows read."""
        axes = _windows(node)
        if not any(axis.in_padding for axis in axes):
            return
        if not any(axis.rest and not axis.in_padding for axis in axes):
            node.attributes.pop("ceil_mode")
        elif all(axis.rest <= axis.end for axis in axes if axis.in_padding):
            ends = [axis.end - axis.rest * axis.in_padding for axis in axes]
            pads = [*(axis.begin for axis in axes), *ends]
            node.attributes["pads"] = ir.AttrInt64s("pads", pads)
        else:
            self.refuse(node, "a window begins in the padding of one axis and in the input of another")
            return
        self.fired += 1


class _Axis(NamedTuple):
    """An axis: its padding, the rest behind the last whole window, whether one more begins in the padding."""

    begin: int
    end: int
    rest: int
    in_padding: bool


def _windows(node: ir.Node) -> list[_Axis]:
    """Return the windows of each axis of a pool, nothing if its sizes are unknown."""
    kernel = list(node.attributes["kernel_shape"].as_ints())
    rank = len(kernel)
    sizes = [static_size(node.inputs[0], _LEADING_AXES + axis) for axis in range(rank)]
    if text_attribute(node, "auto_pad", "NOTSET") != "NOTSET":
        return []
    strides, dilations = (_ints(node, name, [1] * rank) for name in ("strides", "dilations"))
    pads = _ints(node, "pads", [0] * 2 * rank)
    axes = []
    for size, begin, end, width, stride, dilation in zip(
        sizes, pads[:rank], pads[rank:], kernel, strides, dilations, strict=True
    ):
        if size is None:
            return []
        last, rest = divmod(size + begin + end - (width - 1) * dilation - 1, stride)
        axes.append(_Axis(begin, end, rest, rest > 0 and (last + 1) * stride >= size + begin))
    return axes


def _ints(node: ir.Node, name: str, default: Sequence[int]) -> list[int]:
    attribute = node.attributes.get(name)
    return list(default if attribute is None else attribute.as_ints())
