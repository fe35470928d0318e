"""Call the kernels of a library without onnxruntime."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from half_weight import HalfWeight, SplitWeight
from quantized_linear_reference import Floats, Weight
from stored_weight import StoredWeight

from carryall.providers.native.library import load


def isas(library: Path) -> list[str]:
    """Return the instruction sets of the library that this processor supports."""
    found: list[str] = []
    while name := load(library).carryall_supported_isa(len(found)).decode():
        found.append(name)
    return found


def linear(
    library: Path,
    isa: str,
    x: Floats,
    weight: Weight | StoredWeight | HalfWeight | SplitWeight,
    bias: Floats | None = None,
    *,
    steps: tuple[int, int] = (1 << 20, 1 << 20),
    shift: int = 0,
    sizes: Mapping[str, int] | None = None,
) -> Floats:
    """Return the result of a product.

    Args:
        library: the library.
        isa: the instruction set.
        x: [rows, inputs].
        weight: the weight.
        bias: [outputs].
        steps: rows and tiles of a task.
        shift: bytes by which each array is moved off its alignment, a multiple of 4.
        sizes: wrong values of the sizes of the weight, or of ``bytes``.

    Raises:
        ValueError: the kernels refuse the arguments.
    """
    packed = _moved(weight.tiles(), shift)
    moved = _moved(x, shift)
    added = None if bias is None else _moved(bias, shift)
    y = _moved(np.full((len(x), weight.outputs), np.nan, np.float32), shift)
    right = {
        "inputs": weight.inputs,
        "outputs": weight.outputs,
        "bits": weight.bits,
        "block": weight.block,
        "offsets": weight.offsets,
        "group": weight.group_size,
        "bytes": packed.nbytes,
    }
    size = {name: ctypes.c_int64(value) for name, value in (right | dict(sizes or {})).items()}
    message = ctypes.create_string_buffer(200)
    failed = load(library).carryall_linear(
        isa.encode(),
        _pointer(moved),
        ctypes.c_int64(len(x)),
        _pointer(packed),
        size.pop("bytes"),
        _pointer(added),
        *size.values(),
        *map(ctypes.c_int64, steps),
        _pointer(y),
        message,
        ctypes.c_int64(len(message)),
    )
    if failed:
        raise ValueError(message.value.decode())
    return y


def _moved(array: npt.NDArray[Any], shift: int) -> npt.NDArray[Any]:
    """Return a copy that starts ``shift`` bytes after a multiple of 64 and ends at the end of its memory."""
    memory = np.empty(array.nbytes + 64 + shift, np.uint8)
    first = -memory.ctypes.data % 64 + shift
    copy = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _pointer(array: npt.NDArray[Any] | None) -> ctypes.c_void_p | None:
    return None if array is None else ctypes.c_void_p(array.ctypes.data)
