"""A quantized matrix of a checkpoint: integer levels, scales and zero points, read when it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError
from ...records import dataclass
from ...storage.stored_tensor import Array, Packed, RawTensor

Tensors = Mapping[str, RawTensor]
Floats = npt.NDArray[np.float32]
_HALVES: dict[str, np.dtype[Any]] = {"F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
BLOCKS = (128, 64, 32, 16)  # that kernels support, best first


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """A matrix [out, in] as ``(levels - zero_points) * scales``.

    Args:
        levels: [out, in]; uint8 with zero points, else int8 or float8_e4m3fn.
        scales: [out, blocks].
        zero_points: [out, blocks], uint8; None for 0.
        minima: always None; see ``storage.stored_tensor.BlockParts``.
    """

    levels: Array
    scales: Floats
    zero_points: npt.NDArray[np.uint8] | None = None
    minima: None = None


class QuantizedTensor:
    """A stored matrix [out, in].

    Args:
        path: the file of the checkpoint.
        shape: [out, in].
        packed: its blocks.
    """

    halves = None

    def __init__(self, path: Path, shape: tuple[int, int], packed: Packed) -> None:
        self.path, self.shape, self.dtype = path, shape, np.dtype(np.float32)
        self.packed: Packed | None = packed
        self._packed = packed

    def read(self, view: Callable[[Array], Array]) -> Floats:
        """Return a view of the matrix as float32, with inputs in their original order."""
        parts = self._packed.read()
        block = np.arange(self.shape[1]) // self._packed.block_size
        values = parts.levels.astype(np.float32)
        if parts.zero_points is not None:
            values -= parts.zero_points.astype(np.float32)[:, block]
        values *= parts.scales[:, block]
        if self._packed.order is not None:
            ordered, values = values, np.empty_like(values)
            values[:, self._packed.order] = ordered
        return np.ascontiguousarray(view(values), np.float32)


def smaller_blocks(group: int, width: int) -> int:
    """Return a block size that kernels support and that divides ``group``; ``group`` if there is none.

    Args:
        group: number of inputs that share a scale.
        width: number of inputs.
    """
    if group >= width:
        group = width
    if group in BLOCKS:
        return group
    return next((block for block in BLOCKS if group % block == 0), group)


def repeated(per_group: Array, group: int, block: int, width: int) -> Array:
    """Repeat the columns [out, groups] for blocks of a smaller size: [out, ceil(width / block)]."""
    blocks = -(-width // block)
    return np.repeat(per_group, max(1, -(-min(group, width) // block)), axis=1)[:, :blocks]


def unpack(words: Array, bits: int, axis: int) -> npt.NDArray[np.uint8]:
    """Split 32-bit words [n, m] into numbers of ``bits`` bits, the lowest first, along ``axis``."""
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    count, mask = len(shifts), np.uint32(2**bits - 1)
    rows, columns = unsigned.shape
    if axis == 0:
        found = (unsigned[:, None, :] >> shifts[None, :, None]) & mask
        return found.astype(np.uint8).reshape(rows * count, columns)
    found = (unsigned[:, :, None] >> shifts) & mask
    return found.astype(np.uint8).reshape(rows, columns * count)


def needed(tensors: Tensors, name: str) -> RawTensor:
    """Return a tensor.

    Raises:
        CheckpointError: it is missing.
    """
    if name not in tensors:
        raise CheckpointError(f"the checkpoint holds no tensor '{name}', which its quantization needs")
    return tensors[name]


def with_shape(tensors: Tensors, name: str, *shapes: tuple[int, ...]) -> RawTensor:
    """Return a tensor of one of several shapes.

    Raises:
        CheckpointError: it is missing, or has another shape.
    """
    tensor = needed(tensors, name)
    if tensor.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(f"tensor '{name}': expected shape {expected}, found {list(tensor.shape)}")
    return tensor


def matrix_shape(tensors: Tensors, name: str) -> tuple[int, int]:
    """Return the shape of a matrix.

    Raises:
        CheckpointError: the tensor is missing, empty or not a matrix.
    """
    shape = needed(tensors, name).shape
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"tensor '{name}': expected a matrix, found shape {list(shape)}")
    return shape[0], shape[1]


def floats(tensor: RawTensor) -> Floats:
    """Return the values as float32."""
    return tensor.array().astype(np.float32)


def scale_dtype(tensor: RawTensor) -> np.dtype[Any]:
    """Return the dtype to store scales in: that of ``tensor`` if it is a float of 16 bits, else float32."""
    return _HALVES.get(tensor.dtype_name, np.dtype(np.float32))


def input_order(name: str, groups: Array, size: int) -> npt.NDArray[np.intp] | None:
    """Return the inputs sorted by group, so that groups are consecutive; None if they already are.

    Args:
        name: of the tensor, for messages.
        groups: [in], the group of each input.
        size: number of inputs of a group.

    Raises:
        CheckpointError: a group has more or fewer inputs.
    """
    if np.array_equal(groups, np.arange(len(groups)) // size):
        return None
    number = -(-len(groups) // size)
    in_range = len(groups) and groups.min() >= 0 and groups.max() < number
    counts = np.bincount(groups, minlength=number) if in_range else np.zeros(number, int)
    last = len(groups) - size * (number - 1)
    if (counts[:-1] != size).any() or counts[-1:] != last:
        raise CheckpointError(f"tensor '{name}': its groups do not have {size} inputs each")
    return np.argsort(groups, kind="stable")


def count(settings: Mapping[str, Any], key: str, allowed: tuple[int, ...] | None = None) -> int:
    """Return an integer of ``quantization_config``.

    Raises:
        CheckpointError: it is not an integer, or not one of ``allowed``.
    """
    value = settings.get(key)
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or (allowed is not None and value not in allowed)
    ):
        one_of = "" if allowed is None else f" of {', '.join(map(str, allowed))}"
        raise CheckpointError(
            f"config.json: '{key}' of quantization_config must be an integer{one_of}, found {value!r}"
        )
    return value


def modules(tensors: Tensors, suffix: str, others: tuple[str, ...]) -> list[str]:
    """Return the names of the modules that have a tensor ``suffix``.

    Raises:
        CheckpointError: one of ``others`` exists without ``suffix``, or a plain weight beside it.
    """
    names = [name.removesuffix(f".{suffix}") for name in tensors if name.endswith(f".{suffix}")]
    known = set(names)
    for other in others:
        for name in tensors:
            if name.endswith(f".{other}") and name.removesuffix(f".{other}") not in known:
                raise CheckpointError(f"the checkpoint has '{name}', but no '{suffix}' beside it")
    for module in names:
        if f"{module}.weight" in tensors:
            raise CheckpointError(f"the checkpoint has both '{module}.{suffix}' and '{module}.weight'")
    return names
