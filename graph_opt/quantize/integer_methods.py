"""The methods int8-dynamic and int8-static: 8-bit weights and activations."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ...records import dataclass
from ..passes.base import GraphPass
from .algorithms.blockwise import BlockFormat
from .algorithms.smooth import SmoothQuantPass
from .calibration.calibrators import CALIBRATOR
from .formats.dynamic_int8 import DynamicQuantizationPass
from .formats.static_int8 import StaticQuantizationPass
from .method import Made, Measurements, Method
from .search.sensitivity import dynamic_rounding, static_rounding

if TYPE_CHECKING:
    from .recipe import QuantizationRecipe

_BLOCK_SIZE = 32  # block size of weights that are not multiplied in integers, such as the embedding


@dataclass(frozen=True)
class IntegerMethod(Method):
    """8-bit weights and activations.

    Args:
        name: see ``Method``.
        summary: see ``Method``.
        needs_text: whether the ranges of the activations are calibrated.
        settings: see ``Method``.
    """

    name: str
    summary: str
    needs_text: bool
    settings: frozenset[str]

    def passes(self, recipe: QuantizationRecipe, measured: Measurements | None) -> Made:
        form = BlockFormat(
            bits=8, block_size=recipe.block_size or _BLOCK_SIZE, symmetric=recipe.symmetric is not False
        )
        record: dict[str, Any] = {"method": self.name, **form.facts()}
        before: list[GraphPass] = []
        factors = {}
        if recipe.smooth:
            factors = self.measurements(measured).smoothing()
            before.append(SmoothQuantPass(factors))
            record["smooth"] = True
        ranges: dict[str, float] | None = None
        if self.needs_text:
            record["calibrator"] = recipe.calibrator or CALIBRATOR
            ranges = self.measurements(measured).ranges(record["calibrator"], factors)
        exempt: list[str] = []
        overrides: dict[str, BlockFormat | None] = {}
        if recipe.max_error is not None:
            rounding = dynamic_rounding if ranges is None else static_rounding(ranges)
            found = self.measurements(measured).sensitive_layers(recipe.max_error, rounding, factors, form)
            exempt, overrides = found[0], dict.fromkeys(found[1])
        if exempt:
            record["weight_only"] = sorted(exempt)
        return [*before, _quantizer(form, ranges, exempt, overrides)], record


def _quantizer(
    form: BlockFormat,
    ranges: Mapping[str, float] | None,
    exclude: Collection[str],
    overrides: Mapping[str, BlockFormat | None],
) -> GraphPass:
    if ranges is None:
        return DynamicQuantizationPass(form, exclude=exclude, overrides=overrides)
    return StaticQuantizationPass(form, ranges, exclude=exclude, overrides=overrides)


_SETTINGS = frozenset({"block_size", "symmetric", "smooth", "max_error"})
INT8_DYNAMIC = IntegerMethod(
    "int8-dynamic", "8-bit weights and activations, ranges computed at every run", False, _SETTINGS
)
INT8_STATIC = IntegerMethod(
    "int8-static", "8-bit weights and activations, ranges calibrated", True, _SETTINGS | {"calibrator"}
)
METHODS = {method.name: method for method in (INT8_DYNAMIC, INT8_STATIC)}
