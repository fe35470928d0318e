"""Lazy tensors: evaluated when they are written, and composed without being evaluated.

A pass does not compute weights: it wraps the existing tensor in a new lazy one. ``onnx_ir.save`` evaluates
one tensor at a time, so that a model is never entirely in memory. 4-bit tensors are packed as in ONNX: two
values per byte, the low nibble first.
"""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...records import dataclass
from ...storage.stored_tensor import StoredBlocks

Array = npt.NDArray[Any]
_SCANNED = 1 << 18  # floats looked at together
_LOWER = np.uint32(0xFFFF)  # bits of a float32 that bfloat16 lacks
PARTS = "parts"  # in `meta` of concatenated tensors: what they are made of
HALVES = "halves"  # in `meta` of float32 tensors: `Halves`, the same values in 16 bits
# In `meta` of the levels of a quantized weight, or of its floats [in, out]: the weight as its file holds it.
STORED = "stored"


def lazy(compute: Callable[[], Array], dtype: ir.DataType, shape: Sequence[int]) -> ir.LazyTensor:
    """Return a tensor whose content ``compute`` computes again at every access.

    Args:
        compute: returns the content; for 4-bit types packed bytes of any shape.
        dtype: the tensor's element type.
        shape: the tensor's shape.
    """

    def evaluate() -> ir.TensorProtocol:
        array = compute()
        if dtype.bitwidth == 4:
            return ir.PackedTensor(array.reshape(-1), dtype, shape=shape)
        return ir.Tensor(array.reshape(tuple(shape)), dtype=dtype)

    return ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(shape))


class SlabTensor(ir.LazyTensor):
    """A tensor of bytes that is computed and written in slabs, so that it is never whole in memory.

    Args:
        slabs: returns the slabs along the first axis, in order.
        shape: the tensor's shape.
    """

    def __init__(self, slabs: Callable[[], Iterator[npt.NDArray[np.uint8]]], shape: Sequence[int]) -> None:
        self.slabs = slabs
        super().__init__(
            lambda: ir.Tensor(np.concatenate(list(slabs())).reshape(tuple(shape))),
            dtype=ir.DataType.UINT8,
            shape=ir.Shape(shape),
        )


def stored_blocks(tensor: ir.TensorProtocol) -> StoredBlocks | None:
    """Return a weight as its file holds it, from its levels or floats; None without blocks of one type."""
    if (parts := tensor.meta.get(PARTS)) is None:
        known = tensor.meta.get(STORED)
        return known if isinstance(known, StoredBlocks) else None
    blocks = [each for part in parts if (each := stored_blocks(part)) is not None]
    if len(blocks) < len(parts) or len({each.type_name for each in blocks}) != 1:
        return None
    rows = tuple(rows for each in blocks for rows in each.parts)
    return StoredBlocks(blocks[0].type_name, blocks[0].bits, rows)


@dataclass(frozen=True, slots=True)
class Halves:
    """A float32 tensor whose values a 16-bit type holds.

    Args:
        kind: FLOAT16 or BFLOAT16.
        read: returns the values in that type, as uint16 of the tensor's shape.
    """

    kind: ir.DataType
    read: Callable[[], Array]


def halves_of(tensor: ir.TensorProtocol) -> Halves | None:
    """Return the values of a float32 tensor in 16 bits; None if it is not known that these hold them.

    A tensor of a file is read, up to the first value that bfloat16 does not hold.
    """
    if tensor.dtype != ir.DataType.FLOAT:
        return None
    if isinstance(tensor, ir.ExternalTensor):
        words = tensor.numpy().reshape(-1).view(np.uint32)
        exact = (not (words[at : at + _SCANNED] & _LOWER).any() for at in range(0, words.size, _SCANNED))
        if sys.byteorder != "little" or not all(exact):
            return None
        return Halves(ir.DataType.BFLOAT16, lambda: (words >> 16).astype(np.uint16).reshape(shape_of(tensor)))
    if (parts := tensor.meta.get(PARTS)) is not None:
        known = [found for part in parts if (found := halves_of(part)) is not None]
        if len(known) < len(parts) or len({part.kind for part in known}) > 1:
            return None
        return Halves(known[0].kind, lambda: np.concatenate([part.read() for part in known], axis=-1))
    stated = tensor.meta.get(HALVES)
    return stated if isinstance(stated, Halves) else None


def map_weights(model: ir.Model) -> None:
    """Create the memory map of every external weight of 8 or more bits; no data is read.

    ``ir.ExternalTensor`` maps its file at the first access and fails if two threads access it first at the
    same time, which happens when lazy tensors with the same source are written. A missing file is not an
    error here; reading it is.

    The weights of a file share one map: each map keeps a file open, and a process may open about 1000.
    """
    maps: dict[str, mmap.mmap] = {}
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor) or bits_of(tensor.dtype) < 8 or tensor.raw is not None:
            continue
        with contextlib.suppress(OSError, ValueError):
            array, path = tensor.numpy(), os.fspath(tensor.path)
            if tensor.raw is not None and (shared := maps.setdefault(path, tensor.raw)) is not tensor.raw:
                view = np.frombuffer(shared, array.dtype, array.size, tensor.offset or 0)
                tensor._array, tensor.raw = view.reshape(array.shape), shared  # noqa: SLF001 -- no other way


def bits_of(dtype: ir.DataType) -> int:
    """Return the bits of an element; 0 for strings, which have no fixed size."""
    return 0 if dtype == ir.DataType.STRING else dtype.bitwidth


def shape_of(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    """Return the shape as plain integers."""
    # A tensor's sizes are known; ``Shape.numpy`` checks that each time.
    return tensor.shape.dims  # type: ignore[return-value]


def packed_bytes(tensor: ir.TensorProtocol) -> npt.NDArray[np.uint8]:
    """Return the packed bytes of a 4-bit tensor, 1-D, two values per byte."""
    if isinstance(tensor, ir.ExternalTensor):
        buffer = io.BytesIO()  # numpy() and tobytes() would keep an unpacked copy alive
        tensor.tofile(buffer)
        return np.frombuffer(buffer.getbuffer(), np.uint8)
    return np.frombuffer(tensor.tobytes(), np.uint8)


def pack_nibbles(values: Array) -> npt.NDArray[np.uint8]:
    """Pack 4-bit values, one per element, into bytes; the result is 1-D unless the last axis is even."""
    if values.shape[-1] % 2:
        values = values.reshape(-1)
        values = np.append(values, values.dtype.type(0)) if values.size % 2 else values
    raw: npt.NDArray[np.uint8] = values.view(np.uint8)
    return (raw[..., 0::2] & np.uint8(0x0F)) | (raw[..., 1::2] << np.uint8(4))


def unpack_nibbles(packed: npt.NDArray[np.uint8], shape: Sequence[int]) -> npt.NDArray[np.uint8]:
    """Unpack bytes into unsigned 4-bit values, one per uint8 element, of the given shape."""
    flat = np.empty((packed.size, 2), np.uint8)
    flat[:, 0] = packed.reshape(-1) & 0x0F
    flat[:, 1] = packed.reshape(-1) >> 4
    return flat.reshape(-1)[: math.prod(shape)].reshape(tuple(shape))


def transpose(tensor: ir.TensorProtocol) -> ir.LazyTensor:
    """Return the transposed matrix."""
    rows, columns = shape_of(tensor)
    result = lazy(lambda: np.ascontiguousarray(tensor.numpy().T), tensor.dtype, (columns, rows))
    return with_halves(result, tensor, lambda array: array.T)


def reshape(tensor: ir.TensorProtocol, shape: Sequence[int]) -> ir.LazyTensor:
    """Return the tensor with another shape."""
    if tensor.dtype.bitwidth == 4:
        return lazy(lambda: packed_bytes(tensor), tensor.dtype, shape)
    result = lazy(tensor.numpy, tensor.dtype, shape)
    return with_halves(result, tensor, lambda array: array.reshape(tuple(shape)))


def with_halves(
    result: ir.LazyTensor, source: ir.TensorProtocol, view: Callable[[Array], Array]
) -> ir.LazyTensor:
    """Let a tensor that is a view of another one have its values in 16 bits too; return it."""
    if (known := halves_of(source)) is not None:
        result.meta[HALVES] = Halves(known.kind, lambda: view(known.read()))
    return result


def concat_last(tensors: Sequence[ir.TensorProtocol]) -> ir.LazyTensor:
    """Concatenate tensors along the last axis, which must be even for 4-bit tensors."""
    first = tensors[0]
    shape = (*shape_of(first)[:-1], sum(shape_of(tensor)[-1] for tensor in tensors))

    def rows(tensor: ir.TensorProtocol) -> Array:
        if tensor.dtype.bitwidth == 4:
            return packed_bytes(tensor).reshape(*shape_of(tensor)[:-1], -1)
        return tensor.numpy()

    result = lazy(lambda: np.concatenate([rows(tensor) for tensor in tensors], axis=-1), first.dtype, shape)
    result.meta[PARTS] = tuple(tensors)
    return result


class SharedComputation:
    """One computation with several results, each of which becomes a tensor.

    The results are cached until each was read once, or until newer computations exceed 512 MiB. Thread-safe:
    a second thread waits for the first instead of computing again.
    """

    def __init__(self, compute: Callable[[], tuple[Array, ...]]) -> None:
        self._compute = compute
        self._lock = threading.Lock()
        self._parts: tuple[Array, ...] | None = None
        self._taken: set[int] = set()

    def part(self, index: int) -> Array:
        """Return result number ``index``."""
        with self._lock:
            parts = self._parts  # another thread may call forget() at any time
            if parts is None:
                self._parts = parts = self._compute()
                self._taken = set()
                _recent.add(self, sum(part.nbytes for part in parts))
            self._taken.add(index)
            if len(self._taken) == len(parts):
                self._parts = None
                _recent.discard(self)
            return parts[index]

    def forget(self) -> None:
        """Drop the results; the next access computes them again."""
        self._parts = None


class _RecentResults:
    """Limits the total bytes cached by all shared computations; drops the oldest first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._sizes: dict[SharedComputation, int] = {}

    def add(self, computation: SharedComputation, nbytes: int) -> None:
        with self._lock:
            self._sizes[computation] = nbytes
            while sum(self._sizes.values()) > self._capacity and len(self._sizes) > 1:
                oldest = next(iter(self._sizes))
                oldest.forget()
                del self._sizes[oldest]

    def discard(self, computation: SharedComputation) -> None:
        with self._lock:
            self._sizes.pop(computation, None)


_recent = _RecentResults(capacity=512 << 20)
