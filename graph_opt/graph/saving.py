"""Write ONNX files so that every byte that cannot be written is an error."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ...progress import Progress
from ...storage.hashes import LARGE_BYTES, remember_sums
from ...storage.page_sums import PageSums
from ...storage.writing import writing
from .lazy import SlabTensor

_INLINE_BYTES = 256  # tensors up to this size are stored in the ONNX file itself
_MAX_IN_FLIGHT_BYTES = 256 << 20
_ALIGNMENT = 4096  # of large tensors, so that runtimes can map them


class _Unbuffered:
    """A file past its buffer: a write is whole, or an error at once.

    Bytes that wait in a buffer of Python fail again when the file is closed, and onnx_ir then leaves the
    files of other threads open.
    """

    def __init__(self, file: Any, sums: PageSums | None) -> None:
        file.flush()
        self._raw, self._sums = file.raw, sums
        self.fileno, self.flush, self.tell, self.seek = file.fileno, file.flush, file.raw.tell, file.raw.seek

    def write(self, content: Any) -> None:
        """Write all bytes at the file's position."""
        rest = memoryview(content)
        if self._sums is not None:
            self._sums.add(self._raw.tell(), rest)  # while the content is in the caches
        while rest:
            rest = rest[self._raw.write(rest) :]


class _Written(ir.LazyTensor):
    """Writes a tensor by calls that report errors.

    ``ndarray.tofile`` (NumPy 2.4) writes through a buffer of C, whose last 4096 bytes it flushes without
    looking at the result: on a full disk these bytes are lost without an error.
    """

    def __init__(self, tensor: ir.TensorProtocol, sums: PageSums | None) -> None:
        self._sums = sums
        shape = ir.Shape(tensor.shape.numpy())
        super().__init__(lambda: tensor, dtype=tensor.dtype, shape=shape, name=tensor.name)

    def tofile(self, file: Any) -> None:
        """Write the bytes of the tensor."""
        tensor: ir.TensorProtocol = self
        while isinstance(tensor, ir.LazyTensor) and not isinstance(tensor, SlabTensor):
            tensor = tensor.raw()
        target = _Unbuffered(file, self._sums)
        if isinstance(tensor, SlabTensor):
            for slab in tensor.slabs():
                target.write(np.ascontiguousarray(slab).reshape(-1).data)
        elif isinstance(tensor, ir.ExternalTensor):
            if self._sums is not None:
                self._sums.give_up()
            tensor.tofile(target)  # by the kernel's own copying
        elif sys.byteorder == "little" and isinstance(tensor, ir.Tensor) and tensor.dtype.bitwidth >= 8:
            array = np.ascontiguousarray(tensor.numpy())  # without the copy that ``tobytes`` makes
            target.write(array.reshape(-1).view(np.uint8).data)
        else:
            target.write(tensor.tobytes())


def save_checked(model: ir.Model, path: Path, *, sums: PageSums | None = None, **options: Any) -> None:
    """Call ``ir.save`` so that every byte that cannot be written is an error.

    Args:
        model: the graph.
        path: the ONNX file.
        sums: takes what is written to the file of weights.
        options: of ``ir.save``.

    Raises:
        OSError: a file cannot be written.
    """
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    before = [value.const_value for value in values]
    wrapped: dict[int, _Written] = {}
    try:
        for value, tensor in zip(values, before, strict=True):
            if tensor is None or tensor.dtype == ir.DataType.STRING:
                continue
            value.const_value = wrapped.setdefault(id(tensor), _Written(tensor, sums))
        ir.save(model, path, **options)
    finally:
        for value, tensor in zip(values, before, strict=True):
            value.const_value = tensor


def save_model(model: ir.Model, path: Path, progress: Progress | None = None) -> None:
    """Write ``model`` to ``path`` and its weights to ``path`` + ``.data``.

    The writing threads evaluate lazy initializers, a few at a time.

    Raises:
        OSError: a file cannot be written.
    """
    tensors = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    total = sum(tensor.nbytes for tensor in tensors if tensor is not None and tensor.nbytes > _INLINE_BYTES)
    done = 0

    def count(tensor: ir.TensorProtocol, _info: ir.external_data.CallbackInfo) -> None:
        nonlocal done
        done += tensor.nbytes
        if progress is not None:
            progress(done, total, tensor.name or "")

    data, sums = path.with_name(f"{path.name}.data"), PageSums() if total > LARGE_BYTES else None
    with writing(data):
        save_checked(
            model,
            path,
            sums=sums,
            external_data=data.name,
            size_threshold_bytes=_INLINE_BYTES,
            callback=count,
            max_workers=os.cpu_count() or 1,
            max_in_flight_bytes=_MAX_IN_FLIGHT_BYTES,
            alignment=_ALIGNMENT,
        )
    digest = None if sums is None else sums.digest(data.stat().st_size)
    if digest is not None:
        remember_sums(data, digest)
