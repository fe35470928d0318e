"""Lower float32 weights to carryall's own kernels, in 16 bits if these hold their values.

Most checkpoints are bfloat16. Activations, products and sums stay float32, so nothing is lost but the order
of sums. A decoding step reads half as many bytes, and the products can be part of a ``Chain``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...graph.edit import add_initializer, float_attribute, int_attribute, nodes_of, weight
from ...graph.lazy import SlabTensor, halves_of, shape_of
from ...passes.base import GraphPass
from .quantized_linear import form_attributes, lower_consumer
from .tiles import COLUMNS

OFFSETS = {
    ir.DataType.FLOAT16: 5,
    ir.DataType.BFLOAT16: 6,
    ir.DataType.FLOAT: 9,
}  # values of the attribute `offsets`
_SPLIT, _ROUNDED = 10, 13  # of split weights, whose rows are split or rounded
_SPLIT_STEP = 32  # inputs whose high and low parts lie together
_LARGEST = 1e38  # of a split weight: larger ones may be rounded to infinity
_LEAST_SPLIT = 64  # inputs and outputs: with 32, 14 rows and fewer take longer than as floats
_LEAST = COLUMNS  # inputs and outputs
_SLAB_BYTES = 16 << 20  # of tiles


class HalfProductsPass(GraphPass):
    """Lower products with weights that 16 bits hold, and embeddings; a tied head shares the tiles.

    Args:
        wide: lower products with any float32 weight.
        split: store large weights as AMX multiplies bfloat16: one for each value that it holds, else two,
            whose sum differs by 2^-17. Weights of float16 stay as they are. Rows are split into two.
        rounds: round the rows of products with weights that bfloat16 holds to one bfloat16 instead, and split
            weights of float16 too: for many rows.
    """

    def __init__(self, *, wide: bool = False, split: bool = False, rounds: bool = False) -> None:
        super().__init__()
        self._wide, self._split, self._rounds = wide, split, rounds

    def rewrite(self, graph: ir.Graph) -> None:
        """Lower Gather, MatMul, and Gemm with a transposed weight."""
        tiles: dict[tuple[ir.Value, bool, int, int], ir.Value] = {}
        for node, value, tensor in _weights(graph):
            halves = halves_of(tensor)
            kind = ir.DataType.FLOAT if halves is None else halves.kind
            large = node.op_type != "Gather" and min(shape_of(tensor)) >= _LEAST_SPLIT
            if kind == ir.DataType.FLOAT16 and self._rounds and large:
                kind = ir.DataType.FLOAT
            if kind == ir.DataType.FLOAT and (node.op_type == "Gather" or not self._wide):
                continue
            bits = 32 if kind == ir.DataType.FLOAT else 16
            by_output = node.op_type != "MatMul"  # [outputs, inputs]
            inputs, outputs = shape_of(tensor)[::-1] if by_output else shape_of(tensor)
            key = value, by_output, bits, OFFSETS[kind]
            # The tiles of an embedding serve a tied head too.
            splits = self._split and large and kind != ir.DataType.FLOAT16 and key not in tiles
            if splits and (bits == 16 or bool((np.abs(tensor.numpy()) < _LARGEST).all())):
                key = value, by_output, bits, _ROUNDED if bits == 16 and self._rounds else _SPLIT
            if key not in tiles:
                pack = float_tiles if key[-1] == OFFSETS[kind] else split_tiles
                read = tensor.numpy if halves is None or bits == 32 or pack is split_tiles else halves.read
                packed = pack(read, bits, inputs, outputs, by_output=by_output)
                tiles[key] = add_initializer(graph, f"{value.name}.tiles", packed)
            form = form_attributes(bits, 1, 0, key[-1])
            lower_consumer(graph, node, tiles[key], {"inputs": inputs, "outputs": outputs, **form})
            self.fired += 1


def bfloat16_holds(graph: ir.Graph) -> bool:
    """Return whether bfloat16 holds the large weights of all products of a graph, and there are any."""
    products = (tensor for node, _, tensor in _weights(graph) if node.op_type != "Gather")
    found = [halves_of(tensor) for tensor in products if min(shape_of(tensor)) >= _LEAST_SPLIT]
    return bool(found) and all(each is not None and each.kind == ir.DataType.BFLOAT16 for each in found)


def _weights(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value, ir.TensorProtocol]]:
    """Yield the nodes that can be lowered, each with its weight."""
    for op_type, position in (("Gather", 0), ("MatMul", 1), ("Gemm", 1)):
        for node in nodes_of(graph, op_type):
            value = node.inputs[position]
            tensor = weight(value)
            if value is None or tensor is None or len(tensor.shape) != 2 or not _fits(node):
                continue
            if min(shape_of(tensor)) >= _LEAST and tensor.dtype == ir.DataType.FLOAT:
                yield node, value, tensor


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


def float_tile_bytes(inputs: int, bits: int = 16) -> int:
    """Return the bytes of one tile."""
    return -(-inputs * bits // 8 * COLUMNS // 64) * 64


def split_tiles(
    read: Callable[[], npt.NDArray[Any]], bits: int, inputs: int, outputs: int, *, by_output: bool
) -> SlabTensor:
    """Return the tiles of a float32 weight as one bfloat16 or pairs of them, uint8 [tiles, bytes].

    For each 32 inputs a tile has 16 lines of high parts, then 16 of low ones (``sources/layout.h``).

    Args:
        read: returns the values of the weight in float32.
        bits: of both parts, 32; or of high parts alone, 16.
        inputs: of the weight.
        outputs: of the weight.
        by_output: whether it is [outputs, inputs], not [inputs, outputs].
    """
    steps = -(-inputs // _SPLIT_STEP)
    size = bits // 8 * _SPLIT_STEP * COLUMNS * steps
    step = max(1, _SLAB_BYTES // size) * COLUMNS  # outputs

    def slabs() -> Iterator[npt.NDArray[np.uint8]]:
        rows = read() if by_output else read().T
        for first in range(0, outputs, step):
            part = rows[first : first + step]
            count = -(-len(part) // COLUMNS)
            whole = np.zeros((count * COLUMNS, steps * _SPLIT_STEP), np.float32)
            whole[: len(part), :inputs] = part
            high = _rounded(whole)
            low = [_rounded(whole - high)] if bits == 32 else []
            parts = np.stack([_upper(each) for each in (high, *low)])
            # Part, tile, output, step, half, input.
            shape = (len(parts), count, COLUMNS, steps, 2, _SPLIT_STEP // 2)
            lines = parts.reshape(shape).transpose(1, 3, 0, 5, 2, 4)
            yield np.ascontiguousarray(lines).view(np.uint8).reshape(count, size)

    return SlabTensor(slabs, (-(-outputs // COLUMNS), size))


def _rounded(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return floats rounded to bfloat16, ties away from zero."""
    return ((x.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)


def _upper(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def float_tiles(
    read: Callable[[], npt.NDArray[Any]], bits: int, inputs: int, outputs: int, *, by_output: bool
) -> SlabTensor:
    """Return the tiles of a weight, uint8 [tiles, bytes], which are computed when they are written.

    Args:
        read: returns the values of the weight, in a type of ``bits``.
        bits: 16 or 32.
        inputs: of the weight.
        outputs: of the weight.
        by_output: whether it is [outputs, inputs], not [inputs, outputs].
    """
    word = np.dtype(f"u{bits // 8}")
    size = float_tile_bytes(inputs, bits)
    step = max(1, _SLAB_BYTES // size)  # tiles

    def slabs() -> Iterator[npt.NDArray[np.uint8]]:
        rows = read().view(word) if by_output else read().view(word).T
        for first in range(0, outputs, step * COLUMNS):
            part = rows[first : first + step * COLUMNS]
            count = -(-len(part) // COLUMNS)
            tiles = np.zeros((count, size // word.itemsize), word)
            by_input = tiles[:, : inputs * COLUMNS].reshape(count, inputs, COLUMNS)
            whole = len(part) // COLUMNS
            by_input[:whole] = part[: whole * COLUMNS].reshape(whole, COLUMNS, inputs).transpose(0, 2, 1)
            if whole < count:
                by_input[whole, :, : len(part) - whole * COLUMNS] = part[whole * COLUMNS :].T
            yield tiles.view(np.uint8)

    return SlabTensor(slabs, (-(-outputs // COLUMNS), size))
