"""Where onnxruntime's 8-bit products may saturate; see ``integer_sums.py``."""

from __future__ import annotations

import platform

# Parts of the names of operators whose kernels saturate, or that are fused to such ones.
OPERATORS = ("QuantizeLinear", "MatMulInteger", "QLinear", "DynamicQuantize", "QGemm", "QAttention")


def saturates() -> bool:
    """Whether processors of this kind may saturate; onnxruntime knows if this one does."""
    return platform.machine().lower() in ("x86_64", "amd64", "i686", "x86")
