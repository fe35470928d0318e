"""Lower float32 weights whose values 16 bits hold to carryall's own kernels: as many bytes as the checkpoint.

Most checkpoints are bfloat16. Activations, products and sums stay float32, so nothing is lost but the order
of sums. A decoding step reads half as many bytes, and the products can be part of a ``Chain``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ....errors import GraphError
from ...graph.edit import add_initializer, float_attribute, int_attribute, nodes_of, weight
from ...graph.lazy import Array, SlabTensor, half_type, shape_of
from ...passes.base import GraphPass
from .quantized_linear import form_attributes, lower_consumer
from .tiles import COLUMNS

_OFFSETS = {ir.DataType.FLOAT16: 5, ir.DataType.BFLOAT16: 6}  # values of the attribute `offsets`
_LEAST = COLUMNS  # inputs and outputs
_SLAB_BYTES = 16 << 20  # of tiles


class HalfProductsPass(GraphPass):
    """Lower products with such weights, and embeddings; a tied head shares the tiles."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Lower Gather, MatMul, and Gemm with a transposed weight."""
        tiles: dict[tuple[ir.Value, bool], ir.Value] = {}
        for op_type, position in (("Gather", 0), ("MatMul", 1), ("Gemm", 1)):
            for node in nodes_of(graph, op_type):
                value = node.inputs[position]
                tensor = weight(value)
                if value is None or tensor is None or len(tensor.shape) != 2 or not _fits(node):
                    continue
                by_output = op_type != "MatMul"  # [outputs, inputs]
                inputs, outputs = shape_of(tensor)[::-1] if by_output else shape_of(tensor)
                half = half_type(tensor) if min(inputs, outputs) >= _LEAST else None
                if half is None:
                    continue
                key = value, by_output
                if key not in tiles:
                    packed = half_tiles(tensor, half, by_output=by_output)
                    tiles[key] = add_initializer(graph, f"{value.name}.tiles", packed)
                form = form_attributes(16, 1, 0, _OFFSETS[half])
                lower_consumer(graph, node, tiles[key], {"inputs": inputs, "outputs": outputs, **form})
                self.fired += 1


def _fits(node: ir.Node) -> bool:
    """Return whether a node multiplies rows by its weight, or gathers rows of it."""
    if node.op_type == "MatMul":
        return weight(node.inputs[0]) is None
    if node.op_type == "Gather":
        ids = node.inputs[1]
        return not int_attribute(node, "axis", 0) and ids is not None and ids.dtype == ir.DataType.INT64
    plain = all(float_attribute(node, name, 1.0) == 1.0 for name in ("alpha", "beta"))
    biased = len(node.inputs) > 2 and node.inputs[2] is not None
    transposed = int_attribute(node, "transB", 0) == 1 and not int_attribute(node, "transA", 0)
    return plain and transposed and not biased


def half_tile_bytes(inputs: int) -> int:
    """Return the bytes of one tile."""
    return -(-inputs * 2 * COLUMNS // 64) * 64


def half_tiles(tensor: ir.TensorProtocol, half: ir.DataType, *, by_output: bool) -> SlabTensor:
    """Return the tiles of a weight, uint8 [tiles, bytes], which are computed when they are written.

    Args:
        tensor: the weight, float32.
        half: the 16-bit type that holds all of its values.
        by_output: whether it is [outputs, inputs], not [inputs, outputs].
    """
    inputs, outputs = shape_of(tensor)[::-1] if by_output else shape_of(tensor)
    size = half_tile_bytes(inputs)
    step = max(1, _SLAB_BYTES // size) * COLUMNS

    def slabs() -> Iterator[npt.NDArray[np.uint8]]:
        values = tensor.numpy().T if by_output else tensor.numpy()
        for first in range(0, outputs, step):
            columns = _halves(values[:, first : first + step], half, tensor.name or "")
            count = -(-columns.shape[1] // COLUMNS)
            tiles = np.zeros((count, size // 2), np.uint16)
            whole = np.zeros((inputs, count * COLUMNS), np.uint16)
            whole[:, : columns.shape[1]] = columns
            by_tile = whole.reshape(inputs, count, COLUMNS).transpose(1, 0, 2)
            tiles[:, : inputs * COLUMNS] = by_tile.reshape(count, -1)
            yield tiles.view(np.uint8)

    return SlabTensor(slabs, (-(-outputs // COLUMNS), size))


def _halves(values: Array, half: ir.DataType, name: str) -> npt.NDArray[np.uint16]:
    """Return the bits of float32 values in a type that holds them."""
    if half == ir.DataType.BFLOAT16:
        words = values.view(np.uint32)
        exact, bits = not (words & np.uint32(0xFFFF)).any(), (words >> 16).astype(np.uint16)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = values.astype(np.float16)
        exact, bits = (
            np.array_equal(rounded.astype(np.float32), values, equal_nan=True),
            rounded.view(np.uint16),
        )
    if not exact:
        raise GraphError(f"weight '{name}' was taken for {half.name}, but holds values that are not")
    return bits
