"""Checkpoints of bitsandbytes: LLM.int8() and 4 bits (nf4, fp4).

LLM.int8(): weight int8 [out, in], SCB [out]; a weight is level * SCB / 127, which is exact here. 4 bits: a
level is an index into the 16 values of quant_map, times absmax of its block of the flattened matrix. These
values are not evenly spaced, so they are rounded to int8 with the scale absmax / 127. absmax itself may be
quantized: an index into nested_quant_map, times nested_absmax, plus an offset. The first of two nibbles is
the high one. (bitsandbytes: functional.py, QuantState.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError, UnsupportedModelError
from ...storage.stored_tensor import Packed
from .levels import (
    Floats,
    Levels,
    QuantizedTensor,
    Tensors,
    floats,
    matrix_shape,
    needed,
    repeated,
    smaller_blocks,
    with_shape,
)

_STATE = ".weight.quant_state.bitsandbytes__"
_MOST = 127


def read(settings: Mapping[str, Any], tensors: Tensors) -> dict[str, QuantizedTensor]:
    """Return the quantized weights by name.

    Raises:
        CheckpointError: a tensor is missing, or its shape does not fit the others.
        UnsupportedModelError: blocks cross rows of a matrix, or a matrix is not stored by rows.
    """
    quantized = {}
    for name in tensors:
        if name.endswith(".SCB"):
            module = name.removesuffix(".SCB")
            quantized[f"{module}.weight"] = _int8(module, tensors)
        elif _STATE in name:
            module, kind = name.split(_STATE)
            quantized[f"{module}.weight"] = _four_bits(module, kind, tensors)
    return quantized


def facts(tensors: Tensors) -> dict[str, Any]:
    """Return how 4-bit weights are stored, and the largest error relative to the maximum of a block."""
    maps = [floats(tensor) for name, tensor in tensors.items() if name.endswith(".weight.quant_map")]
    if not maps:
        return {}
    error = max(float(np.abs(np.round(one * _MOST) / _MOST - one).max()) for one in maps)
    return {"stored_as": "int8", "max_error": round(error, 5)}


def _int8(module: str, tensors: Tensors) -> QuantizedTensor:
    outputs, inputs = matrix_shape(tensors, f"{module}.weight")
    weight = tensors[f"{module}.weight"]
    largest = with_shape(tensors, f"{module}.SCB", (outputs,))
    if weight.dtype_name != "I8":
        raise CheckpointError(f"tensor '{module}.weight' has dtype {weight.dtype_name}, but SCB is for I8")
    order = tensors.get(f"{module}.weight_format")
    if order is not None and order.array().any():
        raise UnsupportedModelError(
            f"tensor '{module}.weight' of LLM.int8() is not stored by rows; save the model again with "
            "bitsandbytes 0.45 or newer"
        )
    block = smaller_blocks(inputs, inputs)

    def levels() -> Levels:
        scales = (floats(largest) / np.float32(_MOST)).reshape(-1, 1)
        return Levels(levels=np.array(weight.array()), scales=repeated(scales, inputs, block, inputs))

    return QuantizedTensor(weight.path, (outputs, inputs), Packed(bits=8, block_size=block, read=levels))


def _four_bits(module: str, kind: str, tensors: Tensors) -> QuantizedTensor:
    weight, prefix = needed(tensors, f"{module}.weight"), f"{module}.weight"
    state = _state(f"{module}{_STATE}{kind}", tensors)
    (outputs, inputs), group = state["shape"], state["blocksize"]
    count = outputs * inputs
    if inputs % group:
        raise UnsupportedModelError(
            f"tensor '{prefix}': blocks of {group} weights cross rows of {inputs}, which is not supported"
        )
    with_shape(tensors, prefix, (count // 2, 1), (1, count // 2))
    with_shape(tensors, f"{prefix}.quant_map", (16,))
    with_shape(tensors, f"{prefix}.absmax", (count // group,))
    block = smaller_blocks(group, inputs)

    def levels() -> Levels:
        codes = np.round(floats(tensors[f"{prefix}.quant_map"]) * _MOST).astype(np.int8)
        pairs = weight.array().reshape(-1)
        index = np.stack([pairs >> 4, pairs & 15], axis=1).reshape(outputs, inputs)
        scales = (_absmax(prefix, state, tensors) / np.float32(_MOST)).reshape(outputs, -1)
        return Levels(levels=codes[index], scales=repeated(scales, group, block, inputs))

    packed = Packed(bits=8, block_size=block, read=levels)
    return QuantizedTensor(weight.path, (outputs, inputs), packed)


def _state(name: str, tensors: Tensors) -> dict[str, Any]:
    """Return the JSON object that a tensor of bytes holds."""
    try:
        state = json.loads(tensors[name].array().astype(np.uint8).tobytes())
        (rows, columns), block = state["shape"], state["blocksize"]
        right = all(isinstance(size, int) and size > 0 for size in (rows, columns, block))
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"tensor '{name}' does not describe a matrix: {error}") from error
    if not right:
        raise CheckpointError(f"tensor '{name}' does not describe a matrix")
    return dict(state)


def _absmax(prefix: str, state: Mapping[str, Any], tensors: Tensors) -> Floats:
    stored = tensors[f"{prefix}.absmax"]
    if stored.dtype_name != "U8":
        return floats(stored)
    index: npt.NDArray[np.uint8] = stored.array()
    table = floats(with_shape(tensors, f"{prefix}.nested_quant_map", (256,)))
    block = int(state["nested_blocksize"])
    scales = floats(with_shape(tensors, f"{prefix}.nested_absmax", (-(-len(index) // block),)))
    offset = np.float32(state.get("nested_offset", 0))
    found: Floats = table[index] * np.repeat(scales, block)[: len(index)] + offset
    return found
