"""The methods fp16 and bf16, which convert weights and computation to a 16-bit type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from ...records import dataclass
from .formats.half import HalfPrecisionPass
from .formats.half_pass import HALF_TYPES
from .method import Made, Measurements, Method

if TYPE_CHECKING:
    from .recipe import QuantizationRecipe


@dataclass(frozen=True)
class HalfMethod(Method):
    """Convert weights, products, attention and KV cache to a 16-bit type."""

    name: str
    summary: str
    dtype: ir.DataType

    def passes(self, recipe: QuantizationRecipe, measured: Measurements | None) -> Made:
        keep = [] if measured is None else measured.beyond(self.dtype)
        record: dict[str, Any] = {"method": self.name}
        if keep:
            record["float"] = sorted(keep)
        return [HalfPrecisionPass(self.dtype, keep_float=keep)], record


FP16 = HalfMethod("fp16", "16-bit floats with 5 exponent bits", HALF_TYPES["fp16"])
BF16 = HalfMethod("bf16", "16-bit floats with 8 exponent bits, as float32 has", HALF_TYPES["bf16"])
METHODS = {method.name: method for method in (FP16, BF16)}
