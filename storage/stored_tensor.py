"""The interface of a stored tensor, common to all checkpoint formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..records import dataclass

Array = npt.NDArray[Any]


class BlockParts(Protocol):
    """A matrix [out, in] as ``(levels - zero_points) * scales + minima``.

    See ``exporter/gguf/blocks.py`` and ``exporter/quantized/levels.py``.
    """

    @property
    def levels(self) -> Array:
        """[out, in]: int8, uint8 or float8_e4m3fn."""

    @property
    def scales(self) -> npt.NDArray[np.float32]:
        """[out, in / block_size], rounded up."""

    @property
    def zero_points(self) -> npt.NDArray[np.uint8] | None:
        """[out, in / block_size], rounded up; None for 0."""

    @property
    def minima(self) -> npt.NDArray[np.float32] | None:
        """[out, in / block_size]."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Some rows of a matrix of blocks in a file.

    Args:
        row_bytes: the bytes of a row.
        order: int64 [out], the row in the file of each row of the matrix.
        read: returns uint8 [count, row_bytes], rows of the file from the first on; both are its arguments.
    """

    row_bytes: int
    order: npt.NDArray[np.int64]
    read: Callable[[int, int], npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A matrix [out, in] as its file holds it, in blocks along the inputs.

    Args:
        type_name: the type of the blocks, such as ``Q4_K``.
        bits: as of a ``Packed`` matrix.
        parts: its rows, from top to bottom.
    """

    type_name: str
    bits: int
    parts: tuple[StoredRows, ...]


@dataclass(frozen=True, slots=True)
class StoredStack:
    """Matrices of equal shape that a file holds one behind the other, in blocks along the inputs.

    Args:
        type_name: the type of the blocks, such as ``Q4_K``.
        bits: as of a ``Packed`` matrix.
        shape: number of matrices, out and in.
        row_bytes: the bytes of a row of a matrix.
        rows: returns uint8 [count, row_bytes], rows of all matrices from the first on; both are arguments.
        matrices: the names of the single matrices.
        read: returns all floats, of that shape.
    """

    type_name: str
    bits: int
    shape: tuple[int, int, int]
    row_bytes: int
    rows: Callable[[int, int], npt.NDArray[np.uint8]]
    matrices: tuple[str, ...]
    read: Callable[[], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A matrix [out, in] that is quantized in blocks along its inputs.

    Args:
        bits: bits of the smallest ONNX type for all levels: 4 or 8.
        block_size: number of consecutive inputs that share a scale.
        has_minima: whether a float is added to every block.
        has_zero_points: whether every block has a zero point. Levels are signed without both.
        is_float: whether levels are 8-bit floats (E4M3) instead of integers.
        scale_dtype: a float dtype that holds all scales and minima exactly.
        order: [in], the inputs in the order of the levels; None if they are in their own order.
        read: returns the parts.
        stored: the same matrix in the blocks of its file, for kernels that compute with these; None if there
            are none.
    """

    bits: int
    block_size: int
    has_minima: bool = False
    has_zero_points: bool = False
    is_float: bool = False
    scale_dtype: npt.DTypeLike = np.float32
    order: npt.NDArray[np.intp] | None = None
    read: Callable[[], BlockParts]
    stored: StoredBlocks | None = None


class RawTensor(Protocol):
    """A tensor of a checkpoint of any dtype."""

    @property
    def path(self) -> Path:
        """The file of the tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""

    @property
    def dtype_name(self) -> str:
        """The dtype in the format's own words, such as ``I32``."""

    def array(self) -> Array:
        """Return the tensor as it is stored; do not change it."""


class StoredTensor(Protocol):
    """A tensor of a checkpoint that is read on demand."""

    @property
    def path(self) -> Path:
        """The file of the tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array that ``read`` passes to the view."""

    @property
    def packed(self) -> Packed | None:
        """The blocks of a quantized tensor; None for floats."""

    @property
    def halves(self) -> Callable[[Callable[[Array], Array]], Array] | None:
        """Returns a view of the tensor in its ``dtype``, which has 16 bits; None for other tensors."""

    def read(self, view: Callable[[Array], Array]) -> npt.NDArray[np.float32]:
        """Return a view of the tensor as float32, in row-major order."""
