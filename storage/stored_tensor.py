"""What every checkpoint format offers of a tensor, whatever file it lies in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class BlockParts(Protocol):
    """A matrix [out, in] as ``levels * scales + minima``; see ``exporter/gguf/blocks.py``."""

    @property
    def levels(self) -> npt.NDArray[np.int8] | npt.NDArray[np.uint8]:
        """[out, in]."""

    @property
    def scales(self) -> npt.NDArray[np.float32]:
        """[out, in / block_size]."""

    @property
    def minima(self) -> npt.NDArray[np.float32] | None:
        """[out, in / block_size]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A matrix [out, in] that is stored quantized in blocks along its inputs.

    Args:
        bits: of the smallest ONNX type that holds all levels: 4 or 8.
        block_size: consecutive inputs that share a scale.
        has_minima: a float is added to every block; levels are unsigned then, otherwise signed.
        read: returns the parts.
    """

    bits: int
    block_size: int
    has_minima: bool
    read: Callable[[], BlockParts]


class StoredTensor(Protocol):
    """A tensor of a checkpoint that has not been read yet."""

    @property
    def path(self) -> Path:
        """The file it lies in."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """What ``read`` hands to the view."""

    @property
    def packed(self) -> Packed | None:
        """Its blocks, where it is stored quantized."""

    def read(self, view: Callable[[Array], Array]) -> npt.NDArray[np.float32]:
        """Return a view of the tensor as float32, in row-major order."""
