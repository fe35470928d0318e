"""The methods int4 and int8: weight-only quantization in blocks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ...records import dataclass
from .algorithms import hqq, kquant
from .algorithms.blockwise import BlockFormat, Quantizer, round_to_nearest
from .algorithms.grouped import grouped
from .algorithms.rotate import HEAD_TURN, RotatePass
from .algorithms.smooth import SmoothQuantPass
from .formats.weight_only import WeightFormats, WeightOnlyQuantizationPass
from .method import Made, Measurements, Method
from .search.calibrated import CALIBRATED
from .search.outliers import sensitive_weights

if TYPE_CHECKING:
    from ..passes.base import GraphPass
    from .recipe import QuantizationRecipe
    from .search.budget import FormatPlan

UNCALIBRATED: dict[str, Quantizer] = {
    "rtn": grouped(round_to_nearest),
    "hqq": grouped(hqq.quantize),
    "kquant": grouped(kquant.quantize),
}
ALGORITHMS = (*UNCALIBRATED, *CALIBRATED)
FLOAT = "float"
GROUP = 64  # inputs whose 4-bit blocks have multiples of one scale
_SETTINGS = frozenset(
    {"block_size", "symmetric", "algorithm", "embedding", "rotate", "smooth", "budget", "max_kl"}
)
EMBEDDING_BITS = {"int4": 4, "int8": 8, FLOAT: 32}


@dataclass(frozen=True, kw_only=True)
class WeightOnlyMethod(Method):
    """Weight-only quantization to ``bits`` bits; the other fields are defaults of the recipe's settings.

    ``outliers`` is the default of both ``rotate`` and ``smooth``. With ``mixed``, and unless the recipe asks
    for a mix of its own, the weights of ``sensitive_weights`` get 8 bits without a measurement.
    """

    name: str
    summary: str
    bits: int
    symmetric: bool
    algorithm: str
    block_size: int = 32
    embedding: str = "int8"
    outliers: bool = False
    promote: float = 0.0
    mixed: bool = False

    settings: frozenset[str] = _SETTINGS

    def needs_measurements(self, recipe: QuantizationRecipe) -> bool:
        return (
            (recipe.algorithm or self.algorithm) in CALIBRATED
            or self._smooths(recipe)
            or self._promote(recipe) > 0
        )

    def forms(self, recipe: QuantizationRecipe) -> WeightFormats:
        """Return the formats of the weights, before a budget mixes them."""
        symmetric = self.symmetric if recipe.symmetric is None else recipe.symmetric
        size = recipe.block_size or self.block_size
        shared = self.bits == 4 and not symmetric and size < GROUP
        form = BlockFormat(
            bits=self.bits, block_size=size, symmetric=symmetric, group_size=GROUP if shared else 0
        )
        bits = EMBEDDING_BITS[recipe.embedding or self.embedding]
        overrides = {HEAD_TURN: form.wide() if form.bits == 4 else form}  # small, and read by every logit
        if bits not in (4, 8):
            return WeightFormats(form, overrides=overrides, float_embedding=True)
        return WeightFormats(form, None if bits == form.bits else _of_embedding(form, bits), overrides)

    def passes(self, recipe: QuantizationRecipe, measured: Measurements | None) -> Made:
        forms, algorithm = self.forms(recipe), recipe.algorithm or self.algorithm
        rotate, smooth = self._rotates(recipe), self._smooths(recipe)
        before: list[GraphPass] = [RotatePass()] if rotate else []
        if smooth:
            before.append(SmoothQuantPass(self.measurements(measured).smoothing(norms=False)))
        record: dict[str, Any] = {"method": self.name, **forms.form.facts()}
        record |= {"algorithm": algorithm, "embedding_bits": _embedding_bits(forms)}
        record |= {name: True for name, done in (("rotate", rotate), ("smooth", smooth)) if done}
        if self.needs_measurements(recipe) or recipe.budget is not None or recipe.max_kl is not None:
            measured = self.measurements(measured).after(before)
        plan = self._plan(recipe, forms, measured)
        if plan is not None:
            forms = dataclasses.replace(forms, overrides={**forms.overrides, **plan.overrides})
            record["mixed"] = plan.record()
        promote = sensitive_weights if self._mixes(recipe) else None
        if promote is not None:
            record["mixed"] = {"int8": "keys, values and outlying feed-forward layers"}
        calibrated = None
        if algorithm in CALIBRATED:
            layers = self.measurements(measured).layers(algorithm, forms, promote)
            forms, calibrated, promote = layers.forms, layers.result, None  # those that were calibrated
            before += [SmoothQuantPass(layers.factors)] if layers.factors else []
        plain = algorithm if algorithm in UNCALIBRATED else "rtn"
        quantizer = WeightOnlyQuantizationPass(
            forms.form,
            embedding=forms.embedding,
            overrides=forms.overrides,
            float_embedding=forms.float_embedding,
            quantizer=_quantizer(plain, measured),
            calibrated=calibrated,
            promote=promote,
            kept=lambda: None if measured is None else measured.kept(plain, forms),
        )
        return [*before, quantizer], record

    def _rotates(self, recipe: QuantizationRecipe) -> bool:
        return self.outliers if recipe.rotate is None else recipe.rotate

    def _smooths(self, recipe: QuantizationRecipe) -> bool:
        return self.outliers if recipe.smooth is None else recipe.smooth

    def _promote(self, recipe: QuantizationRecipe) -> float:
        if recipe.budget is not None or recipe.max_kl is not None:
            return 0.0
        return self.promote if recipe.promote is None else recipe.promote

    def _mixes(self, recipe: QuantizationRecipe) -> bool:
        """Return whether the most sensitive weights get 8 bits without a measurement."""
        asked = (recipe.promote, recipe.budget, recipe.max_kl)
        return self.mixed and all(setting is None for setting in asked)

    def _plan(
        self, recipe: QuantizationRecipe, forms: WeightFormats, measured: Measurements | None
    ) -> FormatPlan | None:
        """Return the mix of formats that the recipe asks for, None for one format."""
        if recipe.budget is not None or recipe.max_kl is not None:
            return self.measurements(measured).plan(forms, recipe.budget, recipe.max_kl)
        share = self._promote(recipe)
        return self.measurements(measured).promoted(forms, share) if share else None


def _quantizer(algorithm: str, measured: Measurements | None) -> Quantizer:
    native = None if measured is None else measured.quantizer(algorithm)
    return native or UNCALIBRATED[algorithm]


def _of_embedding(form: BlockFormat, bits: int) -> BlockFormat:
    """Return the format of an embedding that has other bits than the layers."""
    return form.wide() if bits == 8 else dataclasses.replace(form, bits=bits)


def _embedding_bits(forms: WeightFormats) -> int:
    if forms.float_embedding:
        return 32
    return (forms.embedding or forms.form).bits


INT4 = WeightOnlyMethod(
    name="int4",
    summary="4-bit weights rounded on a calibration text, the most sensitive layers in 8 bits",
    bits=4,
    symmetric=False,
    algorithm="gptq",
    promote=0.12,
    settings=_SETTINGS | {"promote"},
)
INT4_FAST = WeightOnlyMethod(
    name="int4-fast",
    summary="4-bit weights, a few kinds of layers in 8 bits, without a calibration text",
    bits=4,
    symmetric=False,
    algorithm="kquant",
    mixed=True,
    settings=_SETTINGS | {"promote"},
)
INT8 = WeightOnlyMethod(
    name="int8",
    summary="8-bit weights rounded on a calibration text",
    bits=8,
    symmetric=False,
    algorithm="awq+gptq",
    outliers=True,
)
INT8_FAST = WeightOnlyMethod(
    name="int8-fast",
    summary="8-bit weights, without a calibration text",
    bits=8,
    symmetric=True,
    algorithm="rtn",
)
METHODS = {method.name: method for method in (INT4, INT4_FAST, INT8, INT8_FAST)}
