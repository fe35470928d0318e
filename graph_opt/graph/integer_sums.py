"""Exact sums of 8-bit products in onnxruntime, on x86 processors without VNNI.

There, onnxruntime adds two products uint8 x int8 in 16 bits with saturation: some are wrong by 84 %.
``integer_weights.py`` has the remedy. Most models need none, so this module does not import onnx_ir.
"""

from __future__ import annotations

import mmap
import os
import platform

# Parts of the names of operators whose kernels saturate, or that are fused to such ones.
OPERATORS = ("QuantizeLinear", "MatMulInteger", "QLinear", "DynamicQuantize", "QGemm", "QAttention")


def saturates() -> bool:
    """Whether processors of this kind may saturate; onnxruntime knows if this one does."""
    return platform.machine().lower() in ("x86_64", "amd64", "i686", "x86")


def exact_sums(model: str | os.PathLike[str] | bytes) -> tuple[str | bytes, dict[str, str]]:
    """Return what to open instead of a file or its content, and entries for the session.

    What is no ONNX is returned as it is: onnxruntime says what is wrong with it, or reads its own format.
    """
    model = model if isinstance(model, bytes) else os.fspath(model)
    if not _may_multiply_integers(model):
        return model, {}
    from .integer_weights import exact_weights

    return exact_weights(model)


def _may_multiply_integers(model: str | bytes) -> bool:
    """Whether the serialized model names one of the operators, found without parsing it."""
    if not saturates():
        return False
    names = [name.encode() for name in OPERATORS]
    if isinstance(model, bytes):
        return any(name in model for name in names)
    if not os.stat(model).st_size:
        return False  # it cannot be mapped
    with open(model, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return any(content.find(name) >= 0 for name in names)
