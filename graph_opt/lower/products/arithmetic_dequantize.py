"""Decompose DequantizeLinear of blocked weights into Cast, Sub, Mul and Reshape.

The stored weight gets a block axis: [in, out] becomes [in / block, block, out]. Compilers that keep weights
compressed match this pattern in front of MatMul and Gather. If the last block is partial, all blocks are
split into smaller, full ones.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from ...graph.edit import add_initializer, insert, int_attribute, nodes_of, remove_unused, replace, weight
from ...graph.lazy import Array, lazy, pack_nibbles, packed_bytes, reshape, shape_of, unpack_nibbles
from ...passes.base import GraphPass

# Metadata key: the greatest common divisor of the block sizes of all products, before this pass splits
# partial blocks, so that one such product does not cause small groups for all.
COMMON_BLOCK_SIZE = "common_block_size"
_PRODUCTS = frozenset({"MatMul", "Gemm"})


class ArithmeticDequantizePass(GraphPass):
    """Decompose every ``DequantizeLinear`` of a blocked weight, and store the products' common block size."""

    def __init__(self) -> None:
        super().__init__()
        self._common = 0

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite ``model``, and store the common block size in its metadata if there is one."""
        self._common = 0
        result = super().call(model)
        if self._common:
            model.metadata_props[COMMON_BLOCK_SIZE] = str(self._common)
        return result

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite nodes with a block size and constant operands."""
        for node in nodes_of(graph, "DequantizeLinear"):
            block_size = int_attribute(node, "block_size", 0)
            tensors = [weight(value) for value in node.inputs if value is not None]
            known = [tensor for tensor in tensors if tensor is not None]
            if not block_size:
                continue
            if len(known) < len(tensors):
                self.refuse(node, "its weight, scale or zero point is not constant")
                continue
            if any(use.node.op_type in _PRODUCTS for use in node.outputs[0].uses()):
                self._common = math.gcd(self._common, block_size)
            self._write_out(graph, node, known, block_size)
            self.fired += 1

    @staticmethod
    def _write_out(graph: ir.Graph, node: ir.Node, tensors: list[ir.TensorProtocol], block_size: int) -> None:
        shape = shape_of(tensors[0])
        axis = int_attribute(node, "axis", 1) % len(shape)
        full = math.gcd(shape[axis], block_size)
        blocks = shape[axis] // full
        blocked = (*shape[:axis], blocks, full, *shape[axis + 1 :])
        parameters = (*shape[:axis], blocks, 1, *shape[axis + 1 :])
        if full < block_size:
            tensors = [tensors[0], *(_repeated(one, axis, block_size // full, blocks) for one in tensors[1:])]
        stored = [
            add_initializer(graph, f"{tensor.name}.blocked", reshape(tensor, size))
            for tensor, size in zip(tensors, (blocked, parameters, parameters), strict=False)
        ]
        target = int(tensors[1].dtype)
        value = insert(node, "Cast", [stored[0]], {"to": target}).outputs[0]
        if len(stored) > 2:
            offset = insert(node, "Cast", [stored[2]], {"to": target}).outputs[0]
            value = insert(node, "Sub", [value, offset]).outputs[0]
        scaled = insert(node, "Mul", [value, stored[1]]).outputs[0]
        whole = add_initializer(graph, f"{tensors[0].name}.shape", np.array(shape, np.int64))
        result = insert(node, "Reshape", [scaled, whole]).outputs[0]
        replace(node.outputs[0], result)
        remove_unused(graph, node)


def _repeated(tensor: ir.TensorProtocol, axis: int, times: int, size: int) -> ir.TensorProtocol:
    """Return a tensor with every element repeated along an axis, truncated to ``size``."""
    shape = shape_of(tensor)
    wanted = (*shape[:axis], size, *shape[axis + 1 :])

    def compute() -> Array:
        packed = tensor.dtype.bitwidth == 4
        content = unpack_nibbles(packed_bytes(tensor), shape) if packed else tensor.numpy()
        result = np.repeat(content, times, axis=axis).take(range(size), axis=axis)
        return pack_nibbles(result) if packed else result

    repeated = lazy(compute, tensor.dtype, wanted)
    repeated.name = tensor.name
    return repeated
