"""The quantization methods by name. To add one, write its file and add it here."""

from __future__ import annotations

from .half_methods import BF16, FP16
from .integer_methods import INT8_DYNAMIC, INT8_STATIC
from .method import Method
from .weight_methods import INT4, INT4_FAST, INT8, INT8_FAST

METHODS: dict[str, Method] = {
    method.name: method
    for method in (INT4, INT4_FAST, INT8, INT8_FAST, INT8_DYNAMIC, INT8_STATIC, FP16, BF16)
}
