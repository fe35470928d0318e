"""Give products with int4 weights to carryall's own ``MatMulNBits`` on CUDA, made for a few dozen rows.

It has the inputs and attributes of com.microsoft's, and leaves other numbers of rows to onnxruntime's
kernels. With zero points it has a second output, which nobody reads: memory for the unpacked weights of many
rows.
"""

from __future__ import annotations

import onnx_ir as ir

from ...graph.edit import MICROSOFT, insert, int_attribute, nodes_of, remove_unused, replace
from ...passes.base import GraphPass
from .quantized_linear import DOMAIN

_ZEROS, _INPUTS = 3, 4  # inputs before an order of weights and a bias, of which the last are zero points
_GROUPS = (16, 32, 64, 128, 256)
_STEP = 32  # columns that a thread reads at once


class Int4ProductPass(GraphPass):
    """Rewrite products of float16 with weights of 4 bits; see ``providers/cuda``."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Try every MatMulNBits of com.microsoft."""
        for node in nodes_of(graph, "MatMulNBits", MICROSOFT):
            if reason := _misfit(node):
                self.refuse(node, reason)
                continue
            names = ("K", "N", "bits", "block_size")
            attributes = {name: int_attribute(node, name, 0) for name in names}
            operands = [value for value in node.inputs[:_INPUTS] if value is not None]
            lowered = insert(
                node,
                "MatMulNBits",
                operands,
                attributes,
                domain=DOMAIN,
                num_outputs=1 + (len(operands) > _ZEROS),
            )
            lowered.name = node.name
            replace(node.outputs[0], lowered.outputs[0])
            remove_unused(graph, node)
            self.fired += 1


def _misfit(node: ir.Node) -> str | None:
    """Return why the kernel cannot compute a product; None if it can."""
    scales = node.inputs[2].const_value if node.inputs[2] is not None else None
    if scales is None or scales.dtype is not ir.DataType.FLOAT16:
        return "the kernel computes in float16 only"
    if int_attribute(node, "bits", 4) != 4:
        return "the kernel reads weights of 4 bits only"
    inner, group = int_attribute(node, "K", 0), int_attribute(node, "block_size", 0)
    if group not in _GROUPS or inner % _STEP or inner % group:
        return f"the kernel does not read {inner} weights in blocks of {group}"
    if any(value is not None for value in node.inputs[_INPUTS:]):
        return "the kernel has no bias and no order of weights"
    zeros = node.inputs[_ZEROS] if len(node.inputs) > _ZEROS else None
    points = None if zeros is None else zeros.const_value
    if zeros is not None and (points is None or points.dtype is not ir.DataType.UINT8):
        return "the kernel reads zero points in uint8 only"
    return None
