"""Weights of 4-bit floats (E2M1) in blocks: MXFP4 and NVFP4.

Two numbers are in a byte, the first one in the low nibble. MXFP4 has a scale 2^(e - 127) for 32 weights (OCP
Microscaling Formats 1.0). NVFP4 has an E4M3 scale for 16 weights, divided by one number of the whole tensor.
Twice an E2M1 number is an integer of at most 12, so the levels are stored exactly as int8: onnxruntime 1.31
has no DequantizeLinear of FLOAT4E2M1.

Method ``mxfp4`` (gpt-oss): NAME_blocks [experts, out, groups, 16] and NAME_scales [experts, out, groups].
compressed-tensors, "nvfp4-pack-quantized" and "mxfp4-pack-quantized": weight_packed [out, in / 2],
weight_scale [out, groups], and for NVFP4 weight_global_scale [1].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError, UnsupportedModelError
from ...storage.stored_tensor import Array, Packed, RawTensor
from .levels import Floats, Levels, QuantizedTensor, Tensors, floats, matrix_shape, with_shape

_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice those of E2M1
_LEVELS = np.array([*_MAGNITUDES, *(-one for one in _MAGNITUDES)], np.int8)
MXFP4, NVFP4 = 32, 16  # weights that share a scale
_POWERS = ml_dtypes.bfloat16  # holds every power of two of MXFP4
BLOCKS, SCALES = "_blocks", "_scales"


def read(settings: Mapping[str, Any], tensors: Tensors) -> dict[str, QuantizedTensor]:
    """Return the matrices of a checkpoint of the method ``mxfp4``: NAME.EXPERT.weight, [out, in].

    Raises:
        CheckpointError: a tensor is missing, or its shape does not fit the others.
    """
    quantized: dict[str, QuantizedTensor] = {}
    for name in tensors:
        if name.endswith(BLOCKS):
            quantized |= _experts(name.removesuffix(BLOCKS), tensors)
    return quantized


def weight(module: str, tensors: Tensors) -> QuantizedTensor:
    """Return the weight of a module of compressed-tensors.

    Raises:
        CheckpointError: a tensor is missing, or its shape does not fit the others.
    """
    name = f"{module}.weight_packed"
    outputs, columns = matrix_shape(tensors, name)
    inputs, stored = 2 * columns, tensors[name]
    scale, whole = f"{module}.weight_scale", f"{module}.weight_global_scale"
    if whole in tensors:
        scales = with_shape(tensors, scale, (outputs, -(-inputs // NVFP4)))
        divisor = with_shape(tensors, whole, (1,), ())
        return _tensor(
            stored,
            (outputs, inputs),
            NVFP4,
            stored.array,
            lambda: floats(scales) / floats(divisor).reshape(1, 1),
        )
    scales = with_shape(tensors, scale, (outputs, -(-inputs // MXFP4)))
    _check_bytes(scale, scales)
    return _tensor(stored, (outputs, inputs), MXFP4, stored.array, lambda: _powers(scales.array()), _POWERS)


def _experts(name: str, tensors: Tensors) -> dict[str, QuantizedTensor]:
    stored = tensors[f"{name}{BLOCKS}"]
    if len(stored.shape) != 4 or 0 in stored.shape or stored.shape[3] != MXFP4 // 2:
        raise CheckpointError(
            f"tensor '{name}{BLOCKS}': expected shape [experts, out, groups, 16], found {list(stored.shape)}"
        )
    count, outputs, groups, _ = stored.shape
    scales = with_shape(tensors, f"{name}{SCALES}", (count, outputs, groups))
    _check_bytes(f"{name}{BLOCKS}", stored)
    _check_bytes(f"{name}{SCALES}", scales)

    def one(index: int) -> QuantizedTensor:
        return _tensor(
            stored,
            (outputs, groups * MXFP4),
            MXFP4,
            lambda: stored.array()[index].reshape(outputs, -1),
            lambda: _powers(scales.array()[index]),
            _POWERS,
        )

    return {f"{name}.{index}.weight": one(index) for index in range(count)}


def _tensor(
    stored: RawTensor,
    shape: tuple[int, int],
    block: int,
    pairs: Callable[[], Array],
    scales: Callable[[], Floats],
    scale_dtype: npt.DTypeLike = np.float32,
) -> QuantizedTensor:
    def levels() -> Levels:
        codes: npt.NDArray[np.uint8] = pairs()
        index = np.stack([codes & 15, codes >> 4], axis=2).reshape(shape)
        return Levels(levels=_LEVELS[index], scales=(scales() / np.float32(2)).astype(np.float32))

    packed = Packed(bits=8, block_size=block, scale_dtype=scale_dtype, read=levels)
    return QuantizedTensor(stored.path, shape, packed)


def _powers(exponents: Array) -> Floats:
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)


def _check_bytes(name: str, tensor: RawTensor) -> None:
    if tensor.dtype_name not in ("U8", "F8_E8M0"):
        raise UnsupportedModelError(f"tensor '{name}' has dtype {tensor.dtype_name}; supported: U8")
