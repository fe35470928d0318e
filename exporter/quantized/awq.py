"""AWQ checkpoints (AutoAWQ, version "gemm"): ``qweight``, ``qzeros`` and ``scales``.

qweight [in, out / 8] and qzeros [groups, out / 8] hold 8 consecutive outputs in a word, in the order 0, 2, 4,
6, 1, 3, 5, 7 from the lowest bits on (AutoAWQ: awq/modules/linear/gemm.py, awq/utils/packing_utils.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import UnsupportedModelError
from ...storage.stored_tensor import Array, Packed
from .levels import (
    Levels,
    QuantizedTensor,
    Tensors,
    count,
    floats,
    matrix_shape,
    modules,
    repeated,
    scale_dtype,
    smaller_blocks,
    unpack,
    with_shape,
)

_BITS = 4
_PER_WORD = 32 // _BITS
_PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])


def read(settings: Mapping[str, Any], tensors: Tensors) -> dict[str, QuantizedTensor]:
    """Return the quantized weights by name.

    Raises:
        CheckpointError: a tensor is missing, or its shape does not fit the others.
        UnsupportedModelError: the version is not "gemm", or the weights are packed in another way.
    """
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise UnsupportedModelError(f"AWQ version '{version}' is not supported; supported: gemm")
    if settings.get("zero_point") is False or settings.get("backend", "autoawq") == "llm-awq":
        raise UnsupportedModelError(
            "AWQ weights without zero points, or packed by llm-awq, are not supported; take those of AutoAWQ"
        )
    count(settings, "bits", (_BITS,))
    group = count(settings, "group_size")
    found = modules(tensors, "qweight", ("qzeros", "scales"))
    return {f"{name}.weight": _weight(name, tensors, group) for name in found}


def _weight(name: str, tensors: Tensors, group: int) -> QuantizedTensor:
    inputs, columns = matrix_shape(tensors, f"{name}.qweight")
    outputs = columns * _PER_WORD
    group = inputs if group <= 0 or group > inputs else group
    groups = -(-inputs // group)
    words = tensors[f"{name}.qweight"]
    scales = with_shape(tensors, f"{name}.scales", (groups, outputs))
    zeros = with_shape(tensors, f"{name}.qzeros", (groups, columns))
    block = smaller_blocks(group, inputs)

    def levels() -> Levels:
        return Levels(
            levels=np.ascontiguousarray(_unpack(words.array()).T),
            scales=repeated(floats(scales).T, group, block, inputs),
            zero_points=repeated(_unpack(zeros.array()).T, group, block, inputs),
        )

    packed = Packed(
        bits=_BITS, block_size=block, has_zero_points=True, scale_dtype=scale_dtype(scales), read=levels
    )
    return QuantizedTensor(words.path, (outputs, inputs), packed)


def _unpack(words: Array) -> npt.NDArray[np.uint8]:
    rows = unpack(words, _BITS, axis=1)
    return rows.reshape(len(rows), -1, _PER_WORD)[:, :, _PLACES].reshape(len(rows), -1)
