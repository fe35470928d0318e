"""Lower blocked weights to carryall's own kernels, for products and embeddings.

    QuantizedLinear(x, tiles, bias)   x @ W + bias, from int8 activations with a scale per row and block
    QuantizedRows(ids, tiles)         rows of an embedding; a tied head shares the tiles

The kernels (``providers/native``) read the tiles as they are stored, for any number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ...graph.edit import add_initializer, insert, nodes_of, remove_unused, replace, weight
from ...graph.lazy import Array, SlabTensor, lazy, shape_of, stored_blocks, unpack_nibbles
from ...passes.base import GraphPass
from ..kernels import TilePacker
from .block_minima import weight_with_minima
from .blocked_weight import BlockedWeight, blocked_weight, packed_tensors
from .groups import group_size, grouped_scales
from .matmul_nbits import added_bias, around_reshapes, unsupported_axes
from .stored_tiles import FORMS, stored_tiles
from .tiles import BLOCKS, COLUMNS, LAYOUT, MIDDLE, MINIMA, ZERO_POINTS, pack_tiles, tile_bytes

DOMAIN = "carryall"


class QuantizedLinearPass(GraphPass):
    """Lower consumers of blocked weights, with or without minima: products with bias, embeddings.

    Args:
        stored: writes weights of GGUF files as tiles of the same size; None takes their levels and scales.
    """

    def __init__(self, stored: TilePacker | None = None) -> None:
        super().__init__()
        self._stored = stored
        self._tiles: dict[ir.Node | ir.Value, tuple[ir.Value, dict[str, int]]] = {}

    def rewrite(self, graph: ir.Graph) -> None:
        """Lower MatMul, Gemm with a transposed weight, and Gather."""
        self._tiles = {}
        for op_type, position in (("Gather", 0), ("MatMul", 1), ("Gemm", 1)):
            for node in nodes_of(graph, op_type):
                if op_type == "MatMul" and self._lower_kept(graph, node):
                    continue
                blocked, minima = tiled_weight(node.inputs[position])
                if blocked is None:
                    continue
                reason = blocked if isinstance(blocked, str) else _misfit(node, blocked)
                if isinstance(blocked, str) or reason is not None:
                    self.refuse(node, str(reason))
                    continue
                self._lower(graph, node, blocked, minima)
                self.fired += 1

    def _lower_kept(self, graph: ir.Graph, node: ir.Node) -> bool:
        """Lower a product with floats that know the blocks of their file; return whether it is one."""
        value = node.inputs[1]
        tensor = weight(value)
        if value is None or tensor is None:
            return False
        if value not in self._tiles:
            found = kept_tiles(tensor, self._stored)
            if found is None:
                return False
            self._tiles[value] = add_initializer(graph, f"{value.name}.tiles", found[0]), found[1]
        tiles, form = self._tiles[value]
        inputs, outputs = shape_of(tensor)
        lower_consumer(graph, node, tiles, {"inputs": inputs, "outputs": outputs, **form})
        self.fired += 1
        return True

    def _lower(
        self, graph: ir.Graph, node: ir.Node, blocked: BlockedWeight, minima: ir.TensorProtocol | None
    ) -> None:
        if blocked.node not in self._tiles:
            tensor, form = weight_tiles(blocked, minima, self._stored)
            self._tiles[blocked.node] = add_initializer(graph, f"{blocked.stem}.tiles", tensor), form
        tiles, form = self._tiles[blocked.node]
        lower_consumer(graph, node, tiles, {"inputs": blocked.inputs, "outputs": blocked.outputs, **form})


def weight_tiles(
    blocked: BlockedWeight,
    minima: ir.TensorProtocol | None,
    stored: TilePacker | None,
    *,
    grouped: bool = True,
) -> tuple[ir.LazyTensor, dict[str, int]]:
    """Return the tiles of a weight, and the attributes that describe them.

    Args:
        blocked: the weight.
        minima: its minima, if it has any.
        stored: writes weights of GGUF files as tiles of the same size; None takes their levels and scales.
        grouped: store scales in groups if they allow it.
    """
    blocks = None if stored is None else stored_blocks(blocked.values)
    if stored is not None and blocks is not None and blocks.type_name in FORMS:
        tensor = stored_tiles(blocks, blocked.inputs, blocked.outputs, stored)
        return tensor, stored_attributes(blocks.type_name)
    size = group_size(blocked) if grouped and minima is None else 0
    offsets = offsets_of(blocked, minima)
    return packed_tiles(blocked, minima, size), form_attributes(
        blocked.bits, blocked.block_size, size, offsets
    )


def kept_tiles(
    tensor: ir.TensorProtocol, stored: TilePacker | None
) -> tuple[SlabTensor, dict[str, int]] | None:
    """Return the tiles of floats [in, out] that know the blocks of their file, and their attributes.

    Args:
        tensor: a weight.
        stored: as for ``weight_tiles``.

    Returns:
        None if the weight knows none, or the target does not take them.
    """
    blocks = stored_blocks(tensor) if stored is not None and tensor.dtype == ir.DataType.FLOAT else None
    if stored is None or blocks is None or blocks.type_name not in FORMS:
        return None
    inputs, outputs = shape_of(tensor)
    return stored_tiles(blocks, inputs, outputs, stored), stored_attributes(blocks.type_name)


def lower_consumer(graph: ir.Graph, node: ir.Node, tiles: ir.Value, attributes: Mapping[str, int]) -> None:
    """Replace a node that reads a weight by the operator that reads its tiles.

    Args:
        graph: the graph of the node.
        node: Gather of rows, MatMul, or Gemm with a transposed weight; with a bias that is added behind it.
        tiles: uint8 [tiles, bytes].
        attributes: ``inputs``, ``outputs`` and ``form_attributes`` of the weight.
    """
    operands: list[ir.Value | None] = [node.inputs[1], tiles]
    op_type, output, bias = "QuantizedRows", node.outputs[0], None
    if node.op_type != "Gather":
        op_type = "QuantizedLinear"
        x, output = around_reshapes(node) if node.op_type == "Gemm" else (node.inputs[0], node.outputs[0])
        bias, output = added_bias(output, attributes["outputs"])
        operands = [x, tiles, *([bias] if bias is not None else [])]
    attributes = {"layout": LAYOUT, **attributes}
    lowered = insert(output.producer() or node, op_type, operands, attributes, domain=DOMAIN)
    lowered.name = node.name
    replace(output, lowered.outputs[0])
    remove_unused(graph, output.producer())


def form_attributes(bits: int, block_size: int, group_size: int, offsets: int) -> dict[str, int]:
    """Return the attributes that say how a weight is stored; see ``providers/native/sources/layout.h``."""
    return {"bits": bits, "block_size": block_size, "group_size": group_size, "offsets": offsets}


def stored_attributes(type_name: str) -> dict[str, int]:
    """Return the attributes of a weight that keeps the blocks of a GGUF file, of a type of ``FORMS``."""
    form = FORMS[type_name]
    return form_attributes(form.bits, form.block, form.group, form.offsets)


def tiled_weight(value: ir.Value | None) -> tuple[BlockedWeight | str | None, ir.TensorProtocol | None]:
    """Return a weight as ``blocked_weight`` does, with or without minima, and its minima."""
    added = weight_with_minima(value)
    return (blocked_weight(value), None) if added is None else (added.blocked, weight(added.minima))


def _misfit(node: ir.Node, blocked: BlockedWeight) -> str | None:
    """Return why the kernels cannot compute a node, None if they can."""
    if blocked.block_size not in BLOCKS:
        return f"the kernels have no blocks of {blocked.block_size}"
    if blocked.scales.dtype != ir.DataType.FLOAT:
        return f"the kernels compute in fp32, not in {blocked.scales.dtype.name}"
    if node.op_type == "Gather" and (node.inputs[1] is None or node.inputs[1].dtype != ir.DataType.INT64):
        return "its ids are not int64"
    return unsupported_axes(node, blocked)


def offsets_of(blocked: BlockedWeight, minima: ir.TensorProtocol | None) -> int:
    """Return the attribute ``offsets`` of a weight."""
    if minima is not None:
        return MINIMA
    return MIDDLE if blocked.zero_points is None else ZERO_POINTS


def packed_tiles(
    blocked: BlockedWeight, minima: ir.TensorProtocol | None, groups_of: int = 0
) -> ir.LazyTensor:
    """Return the tiles of a weight; they are computed when they are written.

    Args:
        blocked: the weight.
        minima: its minima, if it has any.
        groups_of: its ``group_size``; 0 stores a scale for each block.
    """
    size = tile_bytes(
        blocked.inputs, blocked.bits, blocked.block_size, offsets_of(blocked, minima), groups_of
    )

    def compute() -> Array:
        values, scales, *points = (tensor.numpy() for tensor in packed_tensors(blocked))
        zeros = _zero_points(points[0], blocked) if points else None
        if minima is None:
            groups = grouped_scales(blocked, groups_of) if groups_of else None
            return pack_tiles(values, scales, zeros, bits=blocked.bits, groups=groups)
        added = minima.numpy().astype(np.float32)
        added = added[:, 0].T if blocked.axis == 0 else added[:, :, 0]
        middle = np.float32(1 << (blocked.bits - 1)) if zeros is None else zeros.astype(np.float32)
        return pack_tiles(values, scales, minima=added - scales * middle, bits=blocked.bits)

    return lazy(compute, ir.DataType.UINT8, (-(-blocked.outputs // COLUMNS), size))


def _zero_points(rows: Array, blocked: BlockedWeight) -> Array:
    """Return zero points [outputs, blocks], one per byte, of rows that are padded to whole bytes."""
    if blocked.bits == 8:
        return rows
    return unpack_nibbles(rows, (blocked.outputs, rows.shape[1] * 2))[:, : blocked.blocks]
