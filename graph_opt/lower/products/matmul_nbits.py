"""Lower blocked DequantizeLinear and its consumer to com.microsoft MatMulNBits or GatherBlockQuantized.

An embedding and its tied head share the packed bytes.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...graph.edit import (
    MICROSOFT,
    add_initializer,
    constant,
    insert,
    int_attribute,
    nodes_of,
    replace,
    shared_constant,
    weight,
)
from ...graph.lazy import Array, lazy, packed_bytes, shape_of, unpack_nibbles
from ...passes.base import GraphPass
from ..kernels import Kernels
from .blocked_weight import BlockedWeight, blocked_weight, middle_zero_points, packed_operands


class QuantizedWeightsPass(GraphPass):
    """Lower consumers of blocked weights: matrix products with their bias, and embeddings."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self._packed: dict[ir.Node, list[ir.Value]] = {}

    def rewrite(self, graph: ir.Graph) -> None:
        """Lower MatMul, Gemm with a transposed weight, and Gather."""
        self._packed = {}
        for op_type, position, lower in (
            ("Gather", 0, self._lower_gather),
            ("MatMul", 1, self._lower_product),
            ("Gemm", 1, self._lower_product),
        ):
            for node in nodes_of(graph, op_type):
                blocked = blocked_weight(node.inputs[position])
                if blocked is None:
                    continue
                reason = blocked if isinstance(blocked, str) else self._misfit(node, blocked)
                if isinstance(blocked, str) or reason is not None:
                    self.refuse(node, str(reason))
                    continue
                lower(graph, node, blocked)
                self.fired += 1

    def _misfit(self, node: ir.Node, found: BlockedWeight) -> str | None:
        reason = self._gather_misfit(found) if node.op_type == "Gather" else self._product_misfit(found)
        return reason or unsupported_axes(node, found)

    def _gather_misfit(self, found: BlockedWeight) -> str | None:
        if not self.kernels.gather_block_quantized:
            return "the target has no GatherBlockQuantized"
        return None

    def _product_misfit(self, blocked: BlockedWeight) -> str | None:
        if blocked.bits not in self.kernels.matmul_nbits:
            return f"the target has no MatMulNBits for {blocked.bits} bits"
        if self.kernels.matmul_whole_blocks and blocked.inputs % blocked.block_size:
            return (
                f"the target's MatMulNBits needs whole blocks, not {blocked.inputs} of {blocked.block_size}"
            )
        return None

    def _operands(self, graph: ir.Graph, found: BlockedWeight) -> list[ir.Value]:
        if found.node not in self._packed:
            self._packed[found.node] = packed_operands(graph, found)
        return self._packed[found.node]

    def _lower_product(self, graph: ir.Graph, node: ir.Node, blocked: BlockedWeight) -> None:
        x, output = around_reshapes(node) if node.op_type == "Gemm" else (node.inputs[0], node.outputs[0])
        bias = None
        if self.kernels.matmul_bias:
            bias, output = added_bias(output, blocked.outputs)
        operands: list[ir.Value | None] = [x, *self._operands(graph, blocked)]
        if self.kernels.matmul_zero_points and blocked.zero_points is None:
            operands.append(middle_zero_points(graph, blocked))
        if bias is not None:
            operands += [None] * (5 - len(operands)) + [bias]
        attributes = {
            "K": blocked.inputs,
            "N": blocked.outputs,
            "bits": blocked.bits,
            "block_size": blocked.block_size,
        }
        if self.kernels.accuracy_level:
            attributes["accuracy_level"] = self.kernels.accuracy_level
        lowered = insert(output.producer() or node, "MatMulNBits", operands, attributes, domain=MICROSOFT)
        lowered.name = node.name
        replace(output, lowered.outputs[0])

    def _lower_gather(self, graph: ir.Graph, node: ir.Node, blocked: BlockedWeight) -> None:
        """Gather rows of blocks [N, K / block, ...] with one scale per block, then reshape to [N, K]."""
        packed, scales = self._operands(graph, blocked)[:2]
        last = shared_constant(graph, "slots.last_axis", np.array([-1], np.int64))
        operands = [packed, node.inputs[1], insert(node, "Unsqueeze", [scales, last]).outputs[0]]
        inside = blocked.bits == 8 or self.kernels.gather_zero_points
        if blocked.zero_points is not None and inside:
            operands.append(_zero_points_per_block(graph, blocked, blocked.zero_points))
        attributes = {
            "bits": blocked.bits,
            "block_size": blocked.block_size,
            "gather_axis": 0,
            "quantize_axis": 2,
        }
        gathered = insert(node, "GatherBlockQuantized", operands, attributes, domain=MICROSOFT)
        gathered.name = node.name
        blocks = gathered.outputs[0]
        if blocked.zero_points is not None and not inside:
            offsets = _offsets_per_block(graph, blocked, blocked.zero_points)
            added = insert(node, "Gather", [offsets, node.inputs[1]], {"axis": 0}).outputs[0]
            blocks = insert(node, "Add", [blocks, added]).outputs[0]
        shape = shared_constant(
            graph, f"slots.join_{blocked.inputs}", np.array([0, 0, blocked.inputs], np.int64)
        )
        replace(node.outputs[0], insert(node, "Reshape", [blocks, shape]).outputs[0])


def _offsets_per_block(graph: ir.Graph, blocked: BlockedWeight, points: ir.TensorProtocol) -> ir.Value:
    """Register what 4-bit zero points add to values about the middle: (8 - z) * scale [N, K / block, 1]."""
    shape = (blocked.outputs, blocked.blocks, 1)

    def compute() -> Array:
        scales = blocked.scales.numpy()
        offsets = 8.0 - unpack_nibbles(packed_bytes(points), shape).astype(np.float32)
        return (offsets * scales.astype(np.float32).reshape(shape)).astype(scales.dtype)

    return add_initializer(
        graph, f"{blocked.stem}.gathered_offsets", lazy(compute, blocked.scales.dtype, shape)
    )


def _zero_points_per_block(graph: ir.Graph, blocked: BlockedWeight, points: ir.TensorProtocol) -> ir.Value:
    """Register zero points [N, K / block, 1], one per byte, because each row is padded to whole bytes."""
    shape = (blocked.outputs, blocked.blocks, 1)

    def compute() -> Array:
        return unpack_nibbles(packed_bytes(points), shape) if blocked.bits == 4 else points.numpy()

    return add_initializer(
        graph, f"{blocked.stem}.gathered_zero_points", lazy(compute, ir.DataType.UINT8, shape)
    )


def unsupported_axes(node: ir.Node, blocked: BlockedWeight) -> str | None:
    """Return why a Gather, MatMul or Gemm does not read whole rows of blocks, None if it does."""
    if node.op_type == "Gather":
        rows = blocked.axis == 1 and not int_attribute(node, "axis", 0)
        return None if rows else "it gathers along the blocked axis"
    if node.op_type == "MatMul":
        return None if blocked.axis == 0 else "the weight is blocked along its outputs"
    if not int_attribute(node, "transB", 0) or int_attribute(node, "transA", 0) or blocked.axis != 1:
        return "the Gemm's weight is not blocked along its inputs"
    return "the Gemm has a bias" if len(node.inputs) > 2 and node.inputs[2] is not None else None


def around_reshapes(gemm: ir.Node) -> tuple[ir.Value | None, ir.Value]:
    """Return input and output of a Gemm, outside of the reshapes to and from a matrix if it has them."""
    x, output = gemm.inputs[0], gemm.outputs[0]
    before = x.producer() if x is not None else None
    uses = list(output.uses())
    if before is None or before.op_type != "Reshape" or len(uses) != 1 or uses[0].node.op_type != "Reshape":
        return x, output
    shape = constant(before.inputs[1])
    if shape is None or len(shape) != 2:
        return x, output
    return before.inputs[0], uses[0].node.outputs[0]


def added_bias(output: ir.Value, size: int) -> tuple[ir.Value | None, ir.Value]:
    """Return the bias added to ``output`` and the sum; without a bias, None and ``output``."""
    uses = list(output.uses())
    if output.is_graph_output() or len(uses) != 1 or uses[0].node.op_type != "Add":
        return None, output
    bias = uses[0].node.inputs[1 - uses[0].idx]
    tensor = weight(bias)
    if tensor is None or shape_of(tensor) != (size,):
        return None, output
    return bias, uses[0].node.outputs[0]
