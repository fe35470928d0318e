"""What a quantization method is. One file defines one; ``methods.py`` lists them."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import onnx_ir as ir

from ..passes.base import GraphPass

if TYPE_CHECKING:
    from .algorithms.blockwise import BlockFormat, Floats
    from .formats.weight_only import Forms
    from .recipe import QuantizationRecipe
    from .search.budget import Plan
    from .search.calibrated import QuantizedLayers
    from .search.sensitivity import Rounding

Made = tuple[list[GraphPass], dict[str, Any]]


class Measurements(Protocol):
    """What a method may ask to be measured on the float model, on the recipe's calibration text."""

    def kv_pass(self, *, per_tensor: bool) -> GraphPass:
        """Measure the ranges of the KV cache; return the pass that quantizes it."""

    def plan(self, forms: Forms, bits: float | None, max_kl: float | None) -> Plan:
        """Mix int4, int8 and float weights for a budget of ``bits`` a weight, or else of ``max_kl``."""

    def layers(self, algorithm: str, forms: Forms) -> QuantizedLayers:
        """Quantize the weights one layer after the other with an algorithm that needs calibration."""

    def smoothing(self) -> dict[str, Floats]:
        """Measure what to divide the channels of activations by, by value."""

    def ranges(self, calibrator: str, factors: Mapping[str, Floats]) -> dict[str, float]:
        """Measure the largest magnitude to represent, by value."""

    def beyond(self, dtype: ir.DataType) -> list[str]:
        """Find the values that a 16-bit type cannot hold."""

    def sensitive_layers(
        self, max_error: float, rounding: Rounding, factors: Mapping[str, Floats], form: BlockFormat | None
    ) -> tuple[list[str], list[str]]:
        """Find weights whose products change by more than ``max_error``; and those ``form`` cannot hold."""


class Method(abc.ABC):
    """One way to store weights in fewer bits.

    Attributes:
        name: what users call it.
        summary: one line of help.
        settings: the recipe's fields that it reads; others must keep their defaults.
        needs_text: whether it always runs the model on a calibration text.
    """

    name: str
    summary: str
    settings: frozenset[str] = frozenset()
    needs_text: bool = False

    @abc.abstractmethod
    def passes(self, recipe: QuantizationRecipe, measured: Measurements | None) -> Made:
        """Return the passes, in order, and what the package's record says about them.

        Args:
            recipe: the settings, checked.
            measured: None where the model cannot be run, as when it is exported.

        Raises:
            UsageError: a setting is out of range, or something must be measured and cannot be.
        """

    def measurements(self, measured: Measurements | None) -> Measurements:
        """Return ``measured``.

        Raises:
            UsageError: there are none.
        """
        from ...errors import UsageError

        if measured is None:
            raise UsageError(
                f"method {self.name} needs a calibration: carryall quantize IN OUT --method {self.name}"
            )
        return measured
