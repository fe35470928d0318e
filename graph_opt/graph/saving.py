"""Write ONNX files so that every byte that cannot be written is an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ...progress import Progress
from ...records import dataclass
from ...storage.hashes import LARGE_BYTES, link_known, remember_sums
from ...storage.page_sums import PageSums
from ...storage.writing import HUGE_PAGE_BYTES, writing
from .lazy import SlabTensor, shape_of
from .onnx_files import read_onnx

_INLINE_BYTES = 256  # tensors up to this size are stored in the ONNX file itself
_MAX_IN_FLIGHT_BYTES = 256 << 20
_ALIGNMENT = 4096  # of large tensors, so that runtimes can map them


_OF_FILES = (ir.LazyTensor, ir.ExternalTensor)


class _Unbuffered:
    """A file past its buffer: whole huge pages are written, or an error is raised, at once.

    Linux caches a block of the size of a huge page in one page, if one is left and one write covers the
    block, and maps it so. Bytes that wait in a buffer of Python fail again when the file is closed, and
    onnx_ir then leaves the files of other threads open. Here they wait until others complete their huge page,
    or until ``finish``.
    """

    def __init__(self, file: Any, sums: PageSums | None) -> None:
        file.flush()
        self._raw, self._sums, self._end = file.raw, sums, bytearray()
        self.fileno, self.flush, self.tell, self.seek = file.fileno, file.flush, file.raw.tell, file.raw.seek

    def write(self, content: Any) -> None:
        """Write bytes behind those before."""
        rest = memoryview(content)
        position = self._raw.tell() + len(self._end)
        if self._sums is not None:
            self._sums.add(position, rest)  # while the content is in the caches
        if self._end:
            missing = -position % HUGE_PAGE_BYTES
            self._end += rest[:missing]
            rest, position = rest[missing:], position + missing
            if not rest:
                return
            self.finish()
        whole = (position + len(rest)) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - position
        if whole > 0:
            self._write(rest[:whole])
            rest = rest[whole:]
        self._end += rest

    def finish(self) -> None:
        """Write what waits."""
        self._write(memoryview(self._end))
        self._end = bytearray()

    def _write(self, rest: memoryview) -> None:
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
        target.finish()


def save_checked(
    model: ir.Model, path: Path, *, written: Mapping[int, ir.ExternalTensor] | None = None, **options: Any
) -> None:
    """Call ``ir.save`` so that every byte that cannot be written is an error.

    Args:
        model: the graph.
        path: the ONNX file.
        written: tensors that are in files already, by the ``id`` of those of the graph.
        options: of ``ir.save``.

    Raises:
        OSError: a file cannot be written.
    """
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    before = [value.const_value for value in values]
    wrapped: dict[int, ir.TensorProtocol] = dict(written or {})
    try:
        for value, tensor in zip(values, before, strict=True):
            if tensor is None or tensor.dtype == ir.DataType.STRING:
                continue
            if id(tensor) not in wrapped:
                wrapped[id(tensor)] = _Written(tensor, None)
            value.const_value = wrapped[id(tensor)]
        ir.save(model, path, **options)
    finally:
        for value, tensor in zip(values, before, strict=True):
            value.const_value = tensor


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A file of weights that are read or computed as they are written, which graphs may have in common.

    Args:
        name: of the file, in the folder of each graph.
        prepared: ONNX files of other graphs. Such tensors of equal name, type and shape are equal in all.
    """

    name: str
    prepared: Sequence[Path] = ()


def save_model(
    model: ir.Model,
    path: Path,
    progress: Progress | None = None,
    *,
    weights: WeightsFile | None = None,
    beside: Path | None = None,
) -> None:
    """Write ``model`` to ``path`` and its weights to ``path`` + ``.data``.

    The writing threads evaluate lazy initializers, a few at a time.

    Args:
        model: the graph.
        path: the ONNX file.
        progress: called for every tensor written.
        weights: the file that lazy and stored initializers go to instead. It becomes another name of a
            prepared one if that holds all of them.
        beside: an ONNX file in the same folder. Initializers that it has in a file too, with equal name,
            type, shape and content, are not written again.

    Raises:
        OSError: a file cannot be written.
    """
    values = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    large = [each for each in values if each is not None and each.dtype != ir.DataType.STRING]
    tensors = list({id(each): each for each in large if each.nbytes > _INLINE_BYTES}.values())
    total, done = sum(tensor.nbytes for tensor in tensors), 0

    def count(tensor: ir.TensorProtocol, _info: ir.external_data.CallbackInfo | None = None) -> None:
        nonlocal done
        done += tensor.nbytes
        if progress is not None:
            progress(done, total, tensor.name or "")

    written = {} if beside is None else _written_beside(tensors, beside)
    for tensor in tensors:
        if id(tensor) in written:
            count(tensor)
    tensors = [tensor for tensor in tensors if id(tensor) not in written]
    if weights is not None:
        shared = [tensor for tensor in tensors if isinstance(tensor, _OF_FILES)]
        tensors = [tensor for tensor in tensors if not isinstance(tensor, _OF_FILES)]
        target = path.with_name(weights.name)
        linked = next(filter(None, (_link(shared, file, target) for file in weights.prepared)), None)
        for tensor in shared if linked is not None else ():
            count(tensor)
        written |= _write_tensors(shared, target, count) if linked is None else linked
    written |= _write_tensors(tensors, path.with_name(f"{path.name}.data"), count)
    with writing(path):
        save_checked(model, path, written=written)


def _write_tensors(
    tensors: Sequence[ir.TensorProtocol], file: Path, count: Callable[..., None]
) -> dict[int, ir.ExternalTensor]:
    """Write tensors to a file; return what stands for them in a graph beside it, by their ``id``."""
    if not tensors:
        return {}
    sums = PageSums() if sum(tensor.nbytes for tensor in tensors) > LARGE_BYTES else None
    with writing(file):
        external = ir.external_data.convert_tensors_to_external(
            [_Written(tensor, sums) for tensor in tensors],
            file.parent,
            file.name,
            callback=count,
            max_workers=os.cpu_count() or 1,
            max_in_flight_bytes=_MAX_IN_FLIGHT_BYTES,
            alignment=_ALIGNMENT,
        )
    digest = None if sums is None else sums.digest(file.stat().st_size)
    if digest is not None:
        remember_sums(file, digest)
    return {id(tensor): each for tensor, each in zip(tensors, external, strict=True)}


def _written_beside(tensors: Sequence[ir.TensorProtocol], graph: Path) -> dict[int, ir.ExternalTensor]:
    """Return those weights of another graph's file that equal one of ``tensors``, by the ``id`` of that."""
    initializers = read_onnx(graph).graph.initializers
    equal = dict[int, ir.ExternalTensor]()
    for tensor in tensors:
        value = initializers.get(str(tensor.name))
        known = None if value is None else value.const_value
        if isinstance(known, ir.ExternalTensor) and _is_equal(known, tensor):
            equal[id(tensor)] = known
    return equal


def _is_equal(a: ir.TensorProtocol, b: ir.TensorProtocol) -> bool:
    if a.dtype != b.dtype or shape_of(a) != shape_of(b):
        return False
    first, second = (np.ascontiguousarray(each.numpy()).reshape(-1).view(np.uint8) for each in (a, b))
    return np.array_equal(first, second)


def _link(
    tensors: Sequence[ir.TensorProtocol], graph: Path, target: Path
) -> dict[int, ir.ExternalTensor] | None:
    """Give the file of another graph's weights the name ``target`` too; None if it lacks one of ``tensors``.

    Args:
        tensors: what the file must hold.
        graph: the ONNX file beside it.
        target: a new name.
    """
    initializers = read_onnx(graph).graph.initializers
    external = dict[int, ir.ExternalTensor]()
    for tensor in tensors:
        value = initializers.get(str(tensor.name))
        known = None if value is None else value.const_value
        if not isinstance(known, ir.ExternalTensor) or str(known.location) != target.name:
            return None
        if known.dtype != tensor.dtype or shape_of(known) != shape_of(tensor):
            return None
        external[id(tensor)] = ir.ExternalTensor(
            target.name,
            known.offset,
            known.length,
            known.dtype,
            shape=ir.Shape(shape_of(known)),
            name=str(tensor.name),
            base_dir=target.parent,
        )
    try:
        link_known(graph.with_name(target.name), target)
    except OSError:  # a file system without links, or the file was deleted meanwhile
        return None
    return external
