"""Read safetensors checkpoints lazily through a memory map.

Format: header length (8 bytes, little-endian), JSON header, data;
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from ..errors import WeightWarning as WeightWarning
from ..storage.paths import link_stays_inside, stays_inside
from .config import read_json

Array = npt.NDArray[Any]

DTYPES: dict[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_BLOCK = 128  # rows and columns of a transposed block; source and target fit in the CPU's cache
_LAYER = re.compile(r"(.*?)\.(\d{1,9})\.")
_CHUNK_BYTES = 32 << 20  # converted at a time, so that a large tensor is not in memory twice


@dataclass(frozen=True, slots=True)
class _Entry:
    """The location of a tensor; ``begin`` and ``end`` are byte offsets from the start of the data."""

    file: _MappedFile
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _MappedFile:
    """One safetensors file.

    The safetensors library checks the header. The data is read here because the library's NumPy interface
    does not support bfloat16, copies each tensor, and cannot drop pages, so that memory would grow with the
    checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = 8 + int.from_bytes(file.read(8), "little")
                if size < 8 or start > size:
                    raise self._truncated()
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        self._data_start = start

    def entries(self) -> dict[str, _Entry]:
        """Return the location of each tensor, by name.

        Raises:
            CheckpointError: the header is damaged or the file ends before its last tensor does.
        """
        try:
            with safe_open(self.path, framework="numpy"):
                pass
            header = json.loads(self._map[8 : self._data_start], object_pairs_hook=_without_duplicates)
        except (SafetensorError, ValueError, OSError, RecursionError) as error:
            reason = " ".join(str(error).split())
            if "file not fully covered" in reason:
                raise self._truncated() from error
            raise CheckpointError(
                f"{self.path} is not a safetensors file, its header is damaged: {reason}; download it again"
            ) from error
        header.pop("__metadata__", None)
        return {
            name: _Entry(self, info["dtype"], tuple(info["shape"]), *info["data_offsets"])
            for name, info in header.items()
        }

    def array(self, entry: _Entry) -> Array:
        """Return the tensor as a view of the mapped file."""
        dtype = np.dtype(DTYPES[entry.dtype])
        count = (entry.end - entry.begin) // dtype.itemsize
        flat = np.frombuffer(self._map, dtype, count, offset=self._data_start + entry.begin)
        return flat.reshape(entry.shape)

    def forget(self, entry: _Entry) -> None:
        """Release the tensor's pages, so that memory does not grow with the checkpoint."""
        if hasattr(self._map, "madvise"):
            start = (self._data_start + entry.begin) // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, self._data_start + entry.end - start)

    def _truncated(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is truncated, or has bytes outside of all tensors; download it again"
        )


class Checkpoint:
    """The tensors of a checkpoint folder, single file or sharded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries: dict[str, _Entry] = {}
        for path in _shards(folder):
            if not link_stays_inside(path, folder):
                raise CheckpointError(
                    f"{path} is a link to {path.resolve()}, outside of {folder}; replace the link by a copy"
                )
            self._entries |= _MappedFile(path).entries()
        self._unused = set(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        view: Callable[[Array], Array] | None = None,
        new_name: str | None = None,
    ) -> ir.LazyTensor:
        """Return a lazy float32 tensor, read and converted each time it is evaluated.

        Args:
            name: its name in the checkpoint.
            shape: its expected shape in the checkpoint.
            view: a function applied to the array: a transposition, a slice, a computation.
            new_name: the name of the result, by default ``name``.

        Raises:
            CheckpointError: the tensor is missing, or its shape or dtype is not as expected.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.folder} holds no tensor '{name}'")
        if entry.shape != shape:
            raise CheckpointError(f"tensor '{name}': expected shape {list(shape)}, found {list(entry.shape)}")
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"tensor '{name}': dtype {entry.dtype} is none of {', '.join(DTYPES)}")
        if (entry.end - entry.begin) != np.prod(shape, dtype=int) * np.dtype(DTYPES[entry.dtype]).itemsize:
            raise CheckpointError(f"tensor '{name}': {entry.file.path} gives it the wrong number of bytes")
        self._unused.discard(name)
        view = view or (lambda array: array)
        new_name = new_name or name
        # Applied to a zero-stride placeholder, ``view`` gives the shape without reading the tensor.
        new_shape = view(np.broadcast_to(np.zeros((), DTYPES[entry.dtype]), shape)).shape
        return ir.LazyTensor(
            lambda: ir.tensor(_read(entry, view, name), name=new_name),
            dtype=ir.DataType.FLOAT,
            shape=ir.Shape(new_shape),
            name=new_name,
        )

    def ignore(self, *fragments: str) -> None:
        """Leave tensors whose names contain one of ``fragments`` out of ``unused``."""
        self._unused = {name for name in self._unused if not any(part in name for part in fragments)}

    def unused(self) -> list[str]:
        """Return the sorted names of tensors that were not requested."""
        return sorted(self._unused)

    def layer_counts(self) -> dict[str, int]:
        """Return the number of layers by prefix, such as ``model.layers`` for names ``model.layers.0.*``."""
        numbers: dict[str, set[int]] = defaultdict(set)
        for found in filter(None, map(_LAYER.match, self._entries)):
            numbers[found[1]].add(int(found[2]))
        return {prefix: max(found) + 1 for prefix, found in numbers.items()}


def _shards(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(f"{folder} holds neither {single.name} nor {index.name}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no 'weight_map' object")
    outside = [name for name in weight_map.values() if not stays_inside(name)]
    if outside:
        raise CheckpointError(f"{index} names the shard {outside[0]!r}, which is outside of its folder")
    shards = [folder / name for name in sorted(set(weight_map.values()))]
    for shard in shards:
        if not shard.is_file():
            raise CheckpointError(f"shard {shard.name} is missing in {folder}")
    return shards


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name occurs twice")
    return content


def _read(entry: _Entry, view: Callable[[Array], Array], name: str) -> npt.NDArray[np.float32]:
    array = view(entry.file.array(entry))
    if not array.ndim:
        return np.asarray(array, np.float32)
    result = np.empty(array.shape, np.float32)
    rows = max(1, _CHUNK_BYTES // max(1, result[:1].nbytes))
    for start in range(0, len(array), rows):
        result[start : start + rows] = _contiguous(array[start : start + rows])
        entry.file.forget(entry)
    # A NaN or infinity makes the sum non-finite; only then is every element checked.
    with np.errstate(over="ignore", invalid="ignore"):
        suspicious = not np.isfinite(result.sum())
    if suspicious and not np.isfinite(result).all():
        warnings.warn(f"tensor '{name}' holds NaN or infinity", WeightWarning, stacklevel=2)
    return result


def _contiguous(array: Array) -> Array:
    """Return ``array`` in row-major order, copied block by block.

    NumPy's own copy of a large transposed matrix misses the CPU's cache at nearly every element.
    """
    if array.ndim != 2 or array.flags.c_contiguous:
        return array
    result = np.empty(array.shape, array.dtype)
    bits = np.dtype(f"u{array.dtype.itemsize}")
    source, target = array.view(bits), result.view(bits)
    for row in range(0, array.shape[0], _BLOCK):
        for column in range(0, array.shape[1], _BLOCK):
            block = np.s_[row : row + _BLOCK, column : column + _BLOCK]
            target[block] = source[block]
    return result
