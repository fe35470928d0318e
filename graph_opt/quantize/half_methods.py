"""The methods fp16 and bf16: everything in 16 bits that can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from .formats.half import HalfPrecisionPass
from .formats.half_pass import HALF_TYPES
from .method import Made, Measurements, Method

if TYPE_CHECKING:
    from .recipe import QuantizationRecipe


@dataclass(frozen=True)
class HalfMethod(Method):
    """Weights, products, attention and KV cache in a 16-bit type."""

    name: str
    summary: str
    dtype: ir.DataType

    def passes(self, recipe: QuantizationRecipe, measured: Measurements | None) -> Made:
        """See ``Method``."""
        keep = [] if measured is None else measured.beyond(self.dtype)
        record: dict[str, Any] = {"method": self.name}
        if keep:
            record["float"] = sorted(keep)
        return [HalfPrecisionPass(self.dtype, keep_float=keep)], record


FP16 = HalfMethod("fp16", "16 bits, 5 of them for the exponent", HALF_TYPES["fp16"])
BF16 = HalfMethod("bf16", "16 bits, 8 of them for the exponent, as many as float32 has", HALF_TYPES["bf16"])
