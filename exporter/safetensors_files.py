"""Read safetensors files lazily, through a memory map.

Format: header length (8 bytes, little-endian), JSON header, data;
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from ..records import dataclass
from ..storage.paths import link_stays_inside, stays_inside
from ..storage.stored_tensor import Array, Packed
from .config import read_json

DTYPES: dict[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_OTHERS: dict[str, npt.DTypeLike] = {
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F64": np.float64,
}
_BLOCK = 128  # rows and columns of a tile in a transposition, so that both matrices stay in the CPU cache
_CHUNK_BYTES = 32 << 20  # bytes converted at once, to limit the additional memory of large tensors


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """The file and position of one tensor."""

    file: _MappedFile
    name: str
    dtype_name: str
    shape: tuple[int, ...]
    begin: int
    end: int
    packed: Packed | None = None  # the format stores floats

    @property
    def path(self) -> Path:
        """The file of the tensor."""
        return self.file.path

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array that ``read`` passes to the view.

        Raises:
            CheckpointError: the dtype is not supported, or the number of bytes is not that of the shape.
        """
        return self._dtype(DTYPES)

    def _dtype(self, known: Mapping[str, npt.DTypeLike]) -> np.dtype[Any]:
        if self.dtype_name not in known:
            raise CheckpointError(
                f"tensor '{self.name}': dtype {self.dtype_name} is none of {', '.join(known)}"
            )
        dtype = np.dtype(known[self.dtype_name])
        if (self.end - self.begin) != np.prod(self.shape, dtype=int) * dtype.itemsize:
            raise CheckpointError(f"tensor '{self.name}': {self.path} gives it the wrong number of bytes")
        return dtype

    def array(self) -> Array:
        """Return the tensor as a view of the mapped file.

        Raises:
            CheckpointError: the dtype is unknown, or the number of bytes is not that of the shape.
        """
        return self.file.array(self, self._dtype({**DTYPES, **_OTHERS}))

    @property
    def halves(self) -> Callable[[Callable[[Array], Array]], Array] | None:
        return self._read_halves if self.dtype.itemsize == 2 else None

    def _read_halves(self, view: Callable[[Array], Array]) -> Array:
        array = np.array(self.file.array(self, self.dtype))  # a copy, so that the pages can be released
        self.file.forget(self)
        return view(array)

    def read(self, view: Callable[[Array], Array]) -> npt.NDArray[np.float32]:
        """Return a view of the tensor as float32, in row-major order."""
        array = view(self.file.array(self, self.dtype))
        if not array.ndim:
            return np.asarray(array, np.float32)
        result = np.empty(array.shape, np.float32)
        rows = max(1, _CHUNK_BYTES // max(1, result[:1].nbytes))
        for start in range(0, len(array), rows):
            result[start : start + rows] = _contiguous(array[start : start + rows])
            self.file.forget(self)
        return result


class _MappedFile:
    """One memory-mapped safetensors file.

    The library checks the header. The data is read here, because the library's NumPy API does not support
    bfloat16, copies each tensor, and cannot release pages, so memory would grow with the checkpoint.
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

    def entries(self) -> dict[str, SafetensorsTensor]:
        """All tensors of the file.

        Raises:
            CheckpointError: the header is damaged, or the file ends before the end of its last tensor.
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
            name: SafetensorsTensor(self, name, info["dtype"], tuple(info["shape"]), *info["data_offsets"])
            for name, info in header.items()
        }

    def array(self, entry: SafetensorsTensor, dtype: np.dtype[Any]) -> Array:
        """The tensor as a view of the mapped file."""
        count = (entry.end - entry.begin) // dtype.itemsize
        flat = np.frombuffer(self._map, dtype, count, offset=self._data_start + entry.begin)
        return flat.reshape(entry.shape)

    def forget(self, entry: SafetensorsTensor) -> None:
        """Release the tensor's pages of this process, so that memory does not grow with the checkpoint."""
        if hasattr(self._map, "madvise"):
            start = (self._data_start + entry.begin) // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, self._data_start + entry.end - start)

    def _truncated(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is truncated, or has bytes outside of all tensors; download it again"
        )


def safetensors_in(path: Path) -> dict[str, SafetensorsTensor]:
    """All tensors of one file.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    return _MappedFile(path).entries()


def safetensors_of(folder: Path) -> dict[str, SafetensorsTensor]:
    """All tensors of a checkpoint folder, single file or sharded.

    Raises:
        CheckpointError: a file is missing, damaged, or lies outside of the folder.
    """
    tensors: dict[str, SafetensorsTensor] = {}
    for path in weight_files(folder):
        if not link_stays_inside(path, folder):
            raise CheckpointError(
                f"{path} is a link to {path.resolve()}, outside of {folder}; replace the link by a copy"
            )
        entries = _MappedFile(path).entries()
        doubled = tensors.keys() & entries.keys()
        if doubled:
            raise CheckpointError(f"tensor '{min(doubled)}' is in {tensors[min(doubled)].path} and in {path}")
        tensors |= entries
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, without a look into them.

    Raises:
        CheckpointError: one is missing, or the index is damaged.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        apart = sorted(folder.glob("*.safetensors"))
        found = f", only {apart[0].name}" if apart else ""
        raise CheckpointError(f"{folder} holds neither {single.name} nor {index.name}{found}; add the file")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no 'weight_map' object")
    outside = [name for name in weight_map.values() if not stays_inside(name)]
    if outside:
        raise CheckpointError(f"{index} names the shard {outside[0]!r}, which is outside of its folder")
    shards = [folder / name for name in sorted(set(weight_map.values()))]
    for shard in shards:
        if not shard.is_file():
            raise CheckpointError(f"shard {shard.name} is missing in {folder}; add it, or download it again")
    return shards


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name occurs twice")
    return content


def _contiguous(array: Array) -> Array:
    """Return ``array`` in row-major order, copied in tiles, as NumPy's copy misses the CPU cache."""
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
