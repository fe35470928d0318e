"""The methods int4 and int8: weight-only quantization in blocks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .algorithms import hqq, kquant
from .algorithms.blockwise import BlockFormat, Quantizer, round_to_nearest
from .algorithms.smooth import SmoothQuantPass
from .formats.weight_only import Forms, WeightOnlyQuantizationPass
from .method import Made, Measurements, Method
from .search.calibrated import CALIBRATED

if TYPE_CHECKING:
    from ..passes.base import GraphPass
    from .recipe import QuantizationRecipe

UNCALIBRATED: dict[str, Quantizer] = {
    "rtn": round_to_nearest,
    "hqq": hqq.quantize,
    "kquant": kquant.quantize,
}
ALGORITHMS = (*UNCALIBRATED, *CALIBRATED)
FLOAT = "float"
EMBEDDING_BITS = {"int4": 4, "int8": 8, FLOAT: 32}


@dataclass(frozen=True)
class WeightOnlyMethod(Method):
    """Weight-only quantization to ``bits`` bits; the other fields are defaults of the recipe's settings."""

    name: str
    summary: str
    bits: int
    block_size: int
    symmetric: bool
    algorithm: str
    embedding: str

    settings = frozenset({"block_size", "symmetric", "algorithm", "embedding", "budget", "max_kl"})

    def forms(self, recipe: QuantizationRecipe) -> Forms:
        """Return the formats of the weights, before a budget mixes them."""
        symmetric = self.symmetric if recipe.symmetric is None else recipe.symmetric
        form = BlockFormat(
            bits=self.bits, block_size=recipe.block_size or self.block_size, symmetric=symmetric
        )
        bits = EMBEDDING_BITS[recipe.embedding or self.embedding]
        if bits not in (4, 8):
            return Forms(form, float_embedding=True)
        return Forms(form, None if bits == form.bits else dataclasses.replace(form, bits=bits))

    def passes(self, recipe: QuantizationRecipe, measured: Measurements | None) -> Made:
        """See ``Method``."""
        forms, algorithm = self.forms(recipe), recipe.algorithm or self.algorithm
        record: dict[str, Any] = {"method": self.name, **dataclasses.asdict(forms.form)}
        record |= {"algorithm": algorithm, "embedding_bits": _embedding_bits(forms)}
        if recipe.budget is not None or recipe.max_kl is not None:
            plan = self.measurements(measured).plan(forms, recipe.budget, recipe.max_kl)
            forms = dataclasses.replace(forms, overrides=plan.overrides)
            record["mixed"] = plan.record()
        before: list[GraphPass] = []
        calibrated = None
        if algorithm in CALIBRATED:
            layers = self.measurements(measured).layers(algorithm, forms)
            calibrated = layers.quantizer
            before = [SmoothQuantPass(layers.factors)] if layers.factors else []
        quantizer = WeightOnlyQuantizationPass(
            forms.form,
            embedding=forms.embedding,
            overrides=forms.overrides,
            float_embedding=forms.float_embedding,
            quantizer=UNCALIBRATED.get(algorithm, round_to_nearest),
            calibrated=calibrated,
        )
        return [*before, quantizer], record


def _embedding_bits(forms: Forms) -> int:
    if forms.float_embedding:
        return 32
    return (forms.embedding or forms.form).bits


INT4 = WeightOnlyMethod(
    "int4", "4-bit weights", bits=4, block_size=32, symmetric=False, algorithm="kquant", embedding="int8"
)
INT8 = WeightOnlyMethod(
    "int8", "8-bit weights", bits=8, block_size=32, symmetric=True, algorithm="rtn", embedding="int8"
)
