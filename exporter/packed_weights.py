"""Write a weight that the checkpoint stores quantized as standard nodes with exactly equal values.

The nodes are ``DequantizeLinear(values, scales, [zero_points])`` with blocks along the inputs. An integer
zero point cannot represent the float minimum of a block, so minima are added between two reshapes to
[blocks, block_size, outputs]: ``W = Reshape(Add(Reshape(DequantizeLinear(...)), minima))``. The unsigned
levels then have no zero points, which means 0. Scales and minima that fit a 16-bit dtype are stored in it
(``graph/half_scales.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir

from ..graph_opt.graph.half_scales import Widened
from ..graph_opt.graph.lazy import STORED, SharedComputation, lazy, pack_nibbles
from ..storage.stored_tensor import Array, Packed, StoredBlocks, StoredRows
from .graph import GraphWriter
from .weights import shape_through, warn_unless_finite

View = Callable[[Array], Array]


def packed_weight(
    graph: GraphWriter, packed: Packed, shape: tuple[int, int], view: View, name: str
) -> ir.Value:
    """Write a weight, a view of the stored matrix, and return its float values.

    Args:
        graph: the graph to write to.
        packed: the stored matrix. Its inputs keep the order of ``packed.order``.
        shape: its shape [out, in].
        view: a selection of its outputs, or its transposition, or both.
        name: name of the weight.
    """
    values, small, axis = _view_of_blocks(packed, shape, view)

    # Levels, scales and zero points come from one reading of the file, each lazily: SharedComputation reads
    # when the first is asked for and forgets when the last was taken.
    shared = SharedComputation(partial(_stored_arrays, packed, view, axis, name))
    unsigned = packed.has_minima or packed.has_zero_points
    dtype = ir.DataType[f"{'UINT' if unsigned else 'INT'}{packed.bits}"]
    dtype = ir.DataType.FLOAT8E4M3FN if packed.is_float else dtype
    levels = lazy(lambda: shared.part(0), dtype, values)
    if packed.stored is not None:
        levels.meta[STORED] = _viewed_blocks(packed.stored, shape, view, axis)
    operands = [
        graph.initializer(_named(levels, f"{name}.values")),
        graph.initializer(_named(_floats(shared, 1, packed, small), f"{name}.scales")),
    ]
    attributes = {"axis": axis, "block_size": packed.block_size}
    with graph.unscoped(name):
        if packed.has_zero_points:
            points = lazy(lambda: shared.part(2), dtype, small)
            operands.append(graph.initializer(_named(points, f"{name}.zero_points")))
        if not packed.has_minima:
            return graph.op("DequantizeLinear", *operands, **attributes)
        # Minima belong to blocks, and DequantizeLinear has no offset in floats: the values are split into
        # blocks, so that one Add reaches them all.
        blocks = (*values[:axis], small[axis], packed.block_size, *values[axis + 1 :])
        offsets = (*small[: axis + 1], 1, *small[axis + 1 :])
        minima = _floats(shared, 2, packed, offsets)
        dequantized = graph.op("DequantizeLinear", *operands, **attributes)
        apart = graph.op("Reshape", dequantized, graph.ints(*blocks))
        added = graph.op("Add", apart, graph.initializer(_named(minima, f"{name}.minima")))
        return graph.op("Reshape", added, graph.ints(*values))


def input_blocks(packed: Packed, shape: tuple[int, int], view: View) -> StoredBlocks | None:
    """Return the blocks of a view [in, out] of a matrix, None if it has none along the inputs as they are.

    Args:
        packed: the stored matrix.
        shape: its shape [out, in].
        view: as in ``packed_weight``.
    """
    axis = _view_of_blocks(packed, shape, view)[2]
    if packed.stored is None or packed.order is not None or axis != 0:
        return None
    return _viewed_blocks(packed.stored, shape, view, axis)


def _view_of_blocks(
    packed: Packed, shape: tuple[int, int], view: View
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the shape of a view, that of its blocks, and their axis."""
    values = shape_through(view, shape, np.float32)
    small = shape_through(view, (shape[0], -(-shape[1] // packed.block_size)), np.float32)
    return values, small, 0 if small[1] == values[1] else 1


def _viewed_blocks(stored: StoredBlocks, shape: tuple[int, int], view: View, axis: int) -> StoredBlocks:
    """Return the blocks of a view, which selects outputs and may transpose.

    Args:
        stored: the blocks of the whole matrix, in one part.
        shape: of the whole matrix, [out, in].
        view: as in ``packed_weight``.
        axis: the axis of the inputs in the view.
    """
    (rows,) = stored.parts
    numbers = view(np.broadcast_to(np.arange(shape[0])[:, None], shape))
    order = rows.order[numbers[0] if axis == 0 else numbers[:, 0]]
    return StoredBlocks(stored.type_name, stored.bits, (StoredRows(rows.row_bytes, order, rows.read),))


def _stored_arrays(packed: Packed, view: View, axis: int, name: str) -> tuple[Array, ...]:
    """Return values and scales, then zero points or minima if there are any, as they are stored.

    Args:
        packed: the stored matrix.
        view: the part to write.
        axis: the axis of the blocks in the view.
        name: name of the weight, for warnings.
    """
    parts = packed.read()
    for floats in (parts.scales, parts.minima):
        if floats is not None:
            warn_unless_finite(floats, name)
    levels = np.ascontiguousarray(view(parts.levels))
    arrays = [
        pack_nibbles(levels) if packed.bits == 4 else levels,
        np.ascontiguousarray(view(parts.scales), packed.scale_dtype),
    ]
    if parts.zero_points is not None:
        points = np.ascontiguousarray(view(parts.zero_points))
        arrays.append(pack_nibbles(points) if packed.bits == 4 else points)
    if parts.minima is not None:
        minima = np.expand_dims(view(parts.minima), axis + 1)
        arrays.append(np.ascontiguousarray(minima, packed.scale_dtype))
    return tuple(arrays)


def _floats(shared: SharedComputation, part: int, packed: Packed, shape: tuple[int, ...]) -> ir.LazyTensor:
    """Return scales or minima as float32, which a package stores in ``packed.scale_dtype``."""
    stored = lazy(lambda: shared.part(part), ir.DataType.from_numpy(np.dtype(packed.scale_dtype)), shape)
    return stored if stored.dtype == ir.DataType.FLOAT else Widened(stored)


def _named(tensor: ir.LazyTensor, name: str) -> ir.LazyTensor:
    tensor.name = name
    return tensor
