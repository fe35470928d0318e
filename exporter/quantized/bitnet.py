"""Checkpoints of BitNet b1.58 (https://arxiv.org/abs/2402.17764): ternary weights with one scale a matrix.

weight uint8 [out / 4, in]: the two bits at 2 i of a number are the level plus 1 of output i * out / 4 + its
row. weight_scale is one number: a weight is level * weight_scale (linear_class ``autobitlinear``), or level /
weight_scale (``bitlinear``). With quantization_mode ``online`` weights are floats, which are quantized here:
the scale is their mean absolute value. The 8-bit activations of these models are left to the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError, UnsupportedModelError
from ...storage.stored_tensor import Packed, RawTensor
from .levels import (
    Levels,
    QuantizedTensor,
    Tensors,
    floats,
    matrix_shape,
    needed,
    repeated,
    scale_dtype,
    smaller_blocks,
    with_shape,
)

_PER_NUMBER = 4
_SCALE = ".weight_scale"
_LEAST_MEAN = np.float32(1e-5)  # of absolute values, as transformers bounds it


def read(settings: Mapping[str, Any], tensors: Tensors) -> dict[str, QuantizedTensor]:
    """Return the quantized weights by name.

    Raises:
        CheckpointError: a tensor is missing, has another dtype, or its shape does not fit the others.
        UnsupportedModelError: the layers have norms of their own, or are of an unknown kind.
    """
    kind = settings.get("linear_class", "bitlinear")
    if kind not in ("bitlinear", "autobitlinear"):
        raise UnsupportedModelError(
            f"BitNet's linear_class {kind!r} is not supported; supported: autobitlinear, bitlinear"
        )
    if settings.get("use_rms_norm"):
        raise UnsupportedModelError("BitNet layers with norms of their own (use_rms_norm) are not supported")
    if settings.get("quantization_mode", "offline") == "online" and kind == "autobitlinear":
        kept = settings.get("modules_to_not_convert") or ["lm_head"]
        return {
            name: _rounded(name, tensors)
            for name, tensor in tensors.items()
            if len(tensor.shape) == 2 and ".layers." in name and not any(each in name for each in kept)
        }
    modules = [name.removesuffix(_SCALE) for name in tensors if name.endswith(_SCALE)]
    divides = kind == "bitlinear"
    return {f"{module}.weight": _packed(module, tensors, divides=divides) for module in modules}


def _packed(module: str, tensors: Tensors, *, divides: bool) -> QuantizedTensor:
    name = f"{module}.weight"
    stored, scale = needed(tensors, name), with_shape(tensors, f"{module}{_SCALE}", (1,), ())
    if stored.dtype_name != "U8":
        raise CheckpointError(f"tensor '{name}' has dtype {stored.dtype_name}, but ternary weights are U8")
    rows, inputs = matrix_shape(tensors, name)

    def levels() -> tuple[npt.NDArray[np.int8], np.float32]:
        numbers = stored.array()
        parts = [(numbers >> 2 * part & 3).astype(np.int8) - np.int8(1) for part in range(_PER_NUMBER)]
        value = floats(scale).reshape(())
        return np.concatenate(parts), np.float32(1 / value if divides else value)

    dtype = np.dtype(np.float32) if divides else scale_dtype(scale)
    return _ternary(stored, (rows * _PER_NUMBER, inputs), dtype, levels)


def _rounded(name: str, tensors: Tensors) -> QuantizedTensor:
    stored = needed(tensors, name)

    def levels() -> tuple[npt.NDArray[np.int8], np.float32]:
        weights = floats(stored)
        mean = np.maximum(np.abs(weights).mean(dtype=np.float32), _LEAST_MEAN)
        inverse = np.float32(1) / mean
        return np.clip(np.rint(weights * inverse), -1, 1).astype(np.int8), np.float32(1) / inverse

    return _ternary(stored, matrix_shape(tensors, name), np.dtype(np.float32), levels)


def _ternary(
    stored: RawTensor,
    shape: tuple[int, int],
    dtype: npt.DTypeLike,
    levels: Callable[[], tuple[npt.NDArray[np.int8], np.float32]],
) -> QuantizedTensor:
    """Return a matrix of levels from -1 to 1 with one scale."""
    outputs, inputs = shape
    block = smaller_blocks(inputs, inputs)

    def parts() -> Levels:
        found, scale = levels()
        scales = np.full((outputs, 1), scale, np.float32)
        return Levels(levels=found, scales=repeated(scales, inputs, block, inputs))

    return QuantizedTensor(
        stored.path, shape, Packed(bits=4, block_size=block, scale_dtype=dtype, read=parts)
    )
