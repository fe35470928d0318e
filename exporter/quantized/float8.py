"""Weights of 8-bit floats (E4M3): the method ``fp8``, and "float-quantized" of compressed-tensors.

``fp8``: weight F8_E4M3 [out, in] and weight_scale_inv, one number or one for each block of
``weight_block_size``; a weight is their product, despite the name. "float-quantized": weight_scale is one
number, [out, 1], [out, groups], or one number for each block of ``block_structure``. Format of the numbers:
https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from ...storage.stored_tensor import Array, Packed
from .levels import (
    Floats,
    Levels,
    QuantizedTensor,
    Tensors,
    floats,
    matrix_shape,
    needed,
    repeated,
    scale_dtype,
    smaller_blocks,
)

_DTYPE = "F8_E4M3"


def read(settings: Mapping[str, Any], tensors: Tensors) -> dict[str, QuantizedTensor]:
    """Return the quantized weights of a checkpoint of the method ``fp8`` by name.

    Raises:
        CheckpointError: a tensor is missing, or its shape does not fit the others.
        UnsupportedModelError: the numbers are not E4M3.
    """
    suffix, sizes = ".weight_scale_inv", block_sizes(settings.get("weight_block_size"), "weight_block_size")
    found = [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    return {f"{name}.weight": weight(name, tensors, f"{name}{suffix}", sizes) for name in found}


def block_sizes(value: object, key: str) -> tuple[int, int] | None:
    """Return outputs and inputs of a block; None if there are no blocks of several outputs.

    Raises:
        CheckpointError: the value is neither null nor two sizes.
    """
    if value is None:
        return None
    right = isinstance(value, list) and len(value) == 2
    if not right or not all(isinstance(one, int) and one > 0 for one in value):  # type: ignore[attr-defined]
        raise CheckpointError(
            f"config.json: '{key}' of quantization_config must be two sizes, found {value!r}"
        )
    return value[0], value[1]  # type: ignore[index]


def weight(module: str, tensors: Tensors, scale_name: str, sizes: tuple[int, int] | None) -> QuantizedTensor:
    """Return the weight of a module.

    Args:
        module: its name.
        tensors: all tensors.
        scale_name: the name of its scales.
        sizes: outputs and inputs of a block, if the scales are for blocks of both.

    Raises:
        CheckpointError: the shape of the scales does not fit.
        UnsupportedModelError: the numbers are not E4M3.
    """
    name = f"{module}.weight"
    stored, scale = needed(tensors, name), needed(tensors, scale_name)
    if stored.dtype_name != _DTYPE:
        raise UnsupportedModelError(f"tensor '{name}' has dtype {stored.dtype_name}; supported: {_DTYPE}")
    outputs, inputs = matrix_shape(tensors, name)
    group = _group(scale_name, scale.shape, (outputs, inputs), sizes)
    block = smaller_blocks(group, inputs)

    def levels() -> Levels:
        return Levels(
            levels=stored.array(),
            scales=repeated(_by_output(floats(scale), outputs, sizes), group, block, inputs),
        )

    packed = Packed(bits=8, block_size=block, is_float=True, scale_dtype=scale_dtype(scale), read=levels)
    return QuantizedTensor(stored.path, (outputs, inputs), packed)


def _group(name: str, shape: tuple[int, ...], matrix: tuple[int, int], sizes: tuple[int, int] | None) -> int:
    """Return the number of inputs that share a scale."""
    outputs, inputs = matrix
    if int(np.prod(shape)) == 1 or shape in ((outputs,), (outputs, 1)):
        return inputs
    if sizes is not None and shape == (-(-outputs // sizes[0]), -(-inputs // sizes[1])):
        return sizes[1]
    if sizes is None and len(shape) == 2 and shape[0] == outputs and inputs % shape[1] == 0:
        return inputs // shape[1]
    raise CheckpointError(
        f"tensor '{name}': its shape {list(shape)} does not fit a weight of {outputs} x {inputs} in blocks "
        f"of {sizes or 'one output'}"
    )


def _by_output(scales: Floats, outputs: int, sizes: tuple[int, int] | None) -> Array:
    """Return scales [out, groups]."""
    if scales.size == 1:
        return np.broadcast_to(scales.reshape(1, 1), (outputs, 1))
    if scales.ndim == 2 and sizes is not None and scales.shape[0] != outputs:
        return np.repeat(scales, sizes[0], axis=0)[:outputs]
    return scales.reshape(outputs, -1)
