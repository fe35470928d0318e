"""Replace com.microsoft MatMulNBits and GatherBlockQuantized by DequantizeLinear and MatMul or Gather."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from ...analysis.kernel_blocks import KernelBlocks, dequantized
from ...graph.edit import MICROSOFT, insert, int_attribute, nodes_of, remove_unused, replace, weight
from ...graph.lazy import shape_of
from ..base import GraphPass
from .tied_head import tied_product


class LiftWeightsPass(GraphPass):
    """Replace operators with block-quantized weights.

    Args:
        decoder: whether a product that computes with float activations may become one that kernels round, as
            in the canonical form of decoders. If not, a Transpose stays between, see ``rounds_product``.
        kept: the widths of weights whose float products stay as they are, if ``decoder`` is false.
    """

    def __init__(self, *, decoder: bool = True, kept: Collection[int] = ()) -> None:
        super().__init__()
        self._decoder, self._kept = decoder, kept
        self._tables: dict[ir.TensorProtocol, ir.Value] = {}

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace embeddings first, so that a tied head can share the dequantized table."""
        self._tables = {}
        for op_type, lift in (
            ("GatherBlockQuantized", self._lift_gather),
            ("MatMulNBits", self._lift_product),
        ):
            for node in nodes_of(graph, op_type, MICROSOFT):
                blocks = _blocks(node)
                if isinstance(blocks, str):
                    self.refuse(node, blocks)
                    continue
                if op_type == "MatMulNBits" and self._is_exact(node) and blocks.bits in self._kept:
                    continue
                lift(graph, node, blocks)
                self.fired += 1

    def _lift_gather(self, graph: ir.Graph, node: ir.Node, found: KernelBlocks) -> None:
        table = dequantized(graph, node, found, axis=1)
        self._tables[found.packed] = table
        rows = insert(node, "Gather", [table, node.inputs[1]], {"axis": 0})
        rows.name = node.name
        _finish(graph, node, rows.outputs[0])

    def _lift_product(self, graph: ir.Graph, node: ir.Node, blocks: KernelBlocks) -> None:
        table = self._tables.get(blocks.packed)
        x = node.inputs[0]
        if table is not None and x is not None:
            output = tied_product(node, x, table, blocks.outputs, blocks.inputs)
        elif self._is_exact(node):
            rows = dequantized(graph, node, blocks, axis=1)
            matrix = insert(node, "Transpose", [rows], {"perm": [1, 0]}).outputs[0]
            output = insert(node, "MatMul", [x, matrix]).outputs[0]
        else:
            matrix = dequantized(graph, node, blocks, axis=0)
            output = insert(node, "MatMul", [x, matrix]).outputs[0]
        bias = node.inputs[5] if len(node.inputs) > 5 else None
        if bias is not None:
            output = insert(node, "Add", [output, bias]).outputs[0]
        _finish(graph, node, output)

    def _is_exact(self, node: ir.Node) -> bool:
        """Return whether a product must not round its activations: levels 0 and 1 compute in float32."""
        return not self._decoder and int_attribute(node, "accuracy_level", 0) <= 1


def _finish(graph: ir.Graph, node: ir.Node, output: ir.Value) -> None:
    replace(node.outputs[0], output)
    remove_unused(graph, node)


def _blocks(node: ir.Node) -> KernelBlocks | str:
    gathers = node.op_type == "GatherBlockQuantized"
    names = (0, 2, 3) if gathers else (1, 2, 3)
    values = [node.inputs[index] if len(node.inputs) > index else None for index in names]
    if not gathers and len(node.inputs) > 4 and node.inputs[4] is not None:
        return "it has g_idx, which reorders its inputs"
    producer = values[0].producer() if values[0] is not None else None
    if producer is not None and producer.op_type == "Reshape":
        values[0] = producer.inputs[0]
    packed, scales, points = (weight(value) for value in values)
    if packed is None or scales is None or (values[2] is not None and points is None):
        return "its weight is not constant"
    bits, block_size = int_attribute(node, "bits", 4), int_attribute(node, "block_size", 128)
    if bits not in (4, 8) or packed.dtype != ir.DataType.UINT8:
        return f"its {bits}-bit weight stored as {packed.dtype.name} cannot be expressed in standard ONNX"
    outputs = shape_of(packed)[0]
    held = packed.size * 8 // (bits * outputs)
    inputs = int_attribute(node, "K", held)
    if held != (inputs if gathers else -(-inputs // block_size) * block_size):
        return f"its weight holds {held} inputs instead of {inputs}"
    if inputs % block_size and (gathers or inputs % 2):
        return "its last block is partial, and it is an embedding or has an odd number of inputs"
    if gathers and (int_attribute(node, "gather_axis", 0) or int_attribute(node, "quantize_axis", 1) == 0):
        return "it gathers along the quantized axis"
    if points is not None and points.dtype != ir.DataType.UINT8:
        return "its zero points are not uint8"
    stem = str(values[0] and values[0].name)
    return KernelBlocks(stem, packed, scales, points, outputs, inputs, bits, block_size)
