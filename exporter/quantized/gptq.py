"""GPTQ checkpoints (AutoGPTQ, GPTQModel): ``qweight``, ``qzeros``, ``scales`` and ``g_idx``.

qweight [in * bits / 32, out] holds consecutive inputs in a word, qzeros [groups, out * bits / 32] consecutive
outputs, the lowest bits first. Format "gptq" stores zero points minus 1, "gptq_v2" as they are. Some files
state the wrong one, so the content decides where it can: zero points that are all the middle of the range (8
of 4 bits), as those of symmetric checkpoints, show how they are stored. g_idx [in] is the group of each
input; with ``desc_act`` groups are not consecutive. (GPTQModel: gptqmodel/quantization and
nn_modules/qlinear.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from ...storage.stored_tensor import Packed
from .levels import (
    Levels,
    QuantizedTensor,
    Tensors,
    count,
    floats,
    input_order,
    matrix_shape,
    modules,
    repeated,
    scale_dtype,
    smaller_blocks,
    unpack,
    with_shape,
)

_PARTS = ("qzeros", "scales", "g_idx")


def read(settings: Mapping[str, Any], tensors: Tensors) -> dict[str, QuantizedTensor]:
    """Return the quantized weights by name.

    Raises:
        CheckpointError: a tensor is missing, or its shape does not fit the others.
        UnsupportedModelError: the format is not supported.
    """
    bits, group = count(settings, "bits", (4, 8)), count(settings, "group_size")
    version = settings.get("checkpoint_format", settings.get("format", "gptq"))
    if version not in ("gptq", "gptq_v2"):
        raise UnsupportedModelError(f"GPTQ checkpoint_format '{version}' is not supported: gptq or gptq_v2")
    if settings.get("is_marlin_format") or settings.get("pack_dtype", "int32") != "int32":
        raise UnsupportedModelError(
            "GPTQ weights that are packed for Marlin, or into other words than int32, are not supported; "
            "take the checkpoint in the format gptq"
        )
    found = modules(tensors, "qweight", _PARTS)
    stated = 1 if version == "gptq" else 0
    offset = _offset(found, tensors, bits, stated, symmetric=settings.get("sym") is True)
    return {f"{name}.weight": _weight(name, tensors, bits, group, offset) for name in found}


def _offset(names: Sequence[str], tensors: Tensors, bits: int, stated: int, *, symmetric: bool) -> int:
    """Return what to add to the stored zero points.

    Raises:
        CheckpointError: a symmetric checkpoint stores other zero points than the middle or the middle - 1.
    """
    middle = 1 << bits - 1
    unlike = ""
    offsets: set[int] = set()
    for name in names:
        outputs = matrix_shape(tensors, f"{name}.qweight")[1]
        matrix_shape(tensors, f"{name}.qzeros")
        stored = unpack(tensors[f"{name}.qzeros"].array(), bits, axis=1)[:, :outputs]
        low, high = (int(stored.min()), int(stored.max())) if stored.size else (middle, middle)
        offsets |= {low, high}
        if low != high or low not in (middle, middle - 1):
            unlike = f"tensor '{name}.qzeros' stores zero points from {low} to {high}"
    if not unlike and len(offsets) == 1:
        return middle - offsets.pop()
    if symmetric:
        raise CheckpointError(
            f"{unlike or 'some tensors store other zero points than others'}, but config.json says sym: a "
            f"symmetric checkpoint has {middle - 1} (gptq) or {middle} (gptq_v2) everywhere"
        )
    return stated


def _weight(name: str, tensors: Tensors, bits: int, group: int, offset: int) -> QuantizedTensor:
    per_word = 32 // bits
    rows, outputs = matrix_shape(tensors, f"{name}.qweight")
    inputs = rows * per_word
    group = inputs if group <= 0 or group > inputs else group
    groups = -(-inputs // group)
    words = tensors[f"{name}.qweight"]
    scales = with_shape(tensors, f"{name}.scales", (groups, outputs))
    zeros = with_shape(tensors, f"{name}.qzeros", (groups, -(-outputs // per_word)))
    order = None
    if f"{name}.g_idx" in tensors:
        of_input = with_shape(tensors, f"{name}.g_idx", (inputs,)).array()
        order = input_order(f"{name}.g_idx", of_input, group)
    block = smaller_blocks(group, inputs)

    def levels() -> Levels:
        stored = unpack(words.array(), bits, axis=0)
        ordered = stored if order is None else stored[order]
        points = (unpack(zeros.array(), bits, axis=1)[:, :outputs] + np.uint8(offset)) & np.uint8(2**bits - 1)
        return Levels(
            levels=np.ascontiguousarray(ordered.T),
            scales=repeated(floats(scales).T, group, block, inputs),
            zero_points=repeated(points.T, group, block, inputs),
        )

    packed = Packed(
        bits=bits,
        block_size=block,
        has_zero_points=True,
        scale_dtype=scale_dtype(scales),
        order=order,
        read=levels,
    )
    return QuantizedTensor(words.path, (outputs, inputs), packed)
