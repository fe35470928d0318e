"""Tensors that are computed while they are being written, and compose without being evaluated.

A pass never touches weights: it wraps the tensor it found in a new lazy one. ``onnx_ir.save`` evaluates one
tensor at a time, so that a model is never whole in memory. 4-bit tensors travel packed, two values a byte,
the low half first, as ONNX stores them.
"""

from __future__ import annotations

import contextlib
import io
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Array = npt.NDArray[Any]


def lazy(compute: Callable[[], Array], dtype: ir.DataType, shape: Sequence[int]) -> ir.LazyTensor:
    """Return a tensor whose content ``compute`` makes anew at every access.

    Args:
        compute: returns the content; for 4-bit types packed bytes of any shape.
        dtype: the tensor's type.
        shape: the tensor's shape.
    """

    def evaluate() -> ir.TensorProtocol:
        array = compute()
        if dtype.bitwidth == 4:
            return ir.PackedTensor(array.reshape(-1), dtype, shape=shape)
        return ir.Tensor(array.reshape(tuple(shape)), dtype=dtype)

    return ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(shape))


def map_weights(model: ir.Model) -> None:
    """Map every external weight of whole bytes now, which reads nothing of it.

    ``ir.ExternalTensor`` maps its file at the first access and fails if two threads are first, as they would
    be for lazy tensors of one source while these are written. A missing file is left to whoever reads it.
    """
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and bits_of(tensor.dtype) >= 8:
            with contextlib.suppress(OSError, ValueError):
                tensor.numpy()


def bits_of(dtype: ir.DataType) -> int:
    """Return the bits of an element; 0 for strings, which are of no fixed size."""
    return 0 if dtype == ir.DataType.STRING else dtype.bitwidth


def shape_of(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    """Return the shape as plain integers."""
    return tuple(tensor.shape.numpy())


def packed_bytes(tensor: ir.TensorProtocol) -> npt.NDArray[np.uint8]:
    """Return a 4-bit tensor's bytes, flat, two values a byte."""
    if isinstance(tensor, ir.ExternalTensor):
        buffer = io.BytesIO()  # numpy() and tobytes() would keep an unpacked copy alive
        tensor.tofile(buffer)
        return np.frombuffer(buffer.getbuffer(), np.uint8)
    return np.frombuffer(tensor.tobytes(), np.uint8)


def pack_nibbles(values: Array) -> npt.NDArray[np.uint8]:
    """Pack 4-bit values, one an element, into bytes; flat unless the last axis is even."""
    if values.shape[-1] % 2:
        values = values.reshape(-1)
        values = np.append(values, values.dtype.type(0)) if values.size % 2 else values
    raw: npt.NDArray[np.uint8] = values.view(np.uint8)
    return (raw[..., 0::2] & np.uint8(0x0F)) | (raw[..., 1::2] << np.uint8(4))


def unpack_nibbles(packed: npt.NDArray[np.uint8], shape: Sequence[int]) -> npt.NDArray[np.uint8]:
    """Return the unsigned 4-bit patterns of packed bytes, one an element."""
    flat = np.empty((packed.size, 2), np.uint8)
    flat[:, 0] = packed.reshape(-1) & 0x0F
    flat[:, 1] = packed.reshape(-1) >> 4
    return flat.reshape(-1)[: math.prod(shape)].reshape(tuple(shape))


def transpose(tensor: ir.TensorProtocol) -> ir.LazyTensor:
    """Return the transposed matrix."""
    rows, columns = shape_of(tensor)
    return lazy(lambda: np.ascontiguousarray(tensor.numpy().T), tensor.dtype, (columns, rows))


def reshape(tensor: ir.TensorProtocol, shape: Sequence[int]) -> ir.LazyTensor:
    """Return the same elements under another shape."""
    if tensor.dtype.bitwidth == 4:
        return lazy(lambda: packed_bytes(tensor), tensor.dtype, shape)
    return lazy(tensor.numpy, tensor.dtype, shape)


def concat_last(tensors: Sequence[ir.TensorProtocol]) -> ir.LazyTensor:
    """Concatenate along the last axis. 4-bit tensors need an even last axis."""
    first = tensors[0]
    shape = (*shape_of(first)[:-1], sum(shape_of(tensor)[-1] for tensor in tensors))

    def rows(tensor: ir.TensorProtocol) -> Array:
        if tensor.dtype.bitwidth == 4:
            return packed_bytes(tensor).reshape(*shape_of(tensor)[:-1], -1)
        return tensor.numpy()

    return lazy(lambda: np.concatenate([rows(tensor) for tensor in tensors], axis=-1), first.dtype, shape)


class SharedComputation:
    """One computation whose several results become separate tensors.

    The results are kept until each was taken once, or until newer computations need the room. Safe under
    threads: a second thread waits for the first instead of computing again.
    """

    def __init__(self, compute: Callable[[], tuple[Array, ...]]) -> None:
        self._compute = compute
        self._lock = threading.Lock()
        self._parts: tuple[Array, ...] | None = None
        self._taken: set[int] = set()

    def part(self, index: int) -> Array:
        """Return result number ``index``."""
        with self._lock:
            parts = self._parts  # another thread may forget them at any time
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
    """Bounds the bytes that all shared computations hold together, oldest out first."""

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
