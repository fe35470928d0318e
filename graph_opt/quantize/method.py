"""The interface of quantization methods. ``methods.py`` lists them."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import onnx_ir as ir

from ..passes.base import GraphPass

if TYPE_CHECKING:
    from ...storage.cache import CachedParts
    from .algorithms.blockwise import BlockFormat, Floats, Quantizer
    from .formats.weight_only import Promote, WeightFormats
    from .recipe import QuantizationRecipe
    from .search.budget import FormatPlan
    from .search.calibrated import QuantizedLayers
    from .search.sensitivity import Rounding

Made = tuple[list[GraphPass], dict[str, Any]]


class Measurements(Protocol):
    """Measurements of the float model on the recipe's calibration text."""

    def quantizer(self, algorithm: str) -> Quantizer | None:
        """Return the machine's own routine of an algorithm that needs no text; None if it has none.

        Its values, scales and zero points are those of the algorithm in NumPy, to the bit.
        """

    def after(self, passes: Sequence[GraphPass]) -> Measurements:
        """Return the measurements of the model after passes that do not change its results."""

    def kv_pass(self, *, per_tensor: bool) -> GraphPass:
        """Measure the ranges of the KV cache; return the pass that quantizes it."""

    def plan(self, forms: WeightFormats, bits: float | None, max_kl: float | None) -> FormatPlan:
        """Mix int4, int8 and float weights for a budget of ``bits`` per weight, or of ``max_kl`` nats."""

    def promoted(self, forms: WeightFormats, share: float) -> FormatPlan:
        """Choose 8 bits for ``sensitive_weights``, then for the kinds of layers that lose most on the text.

        The additional bits are at most ``share``.
        """

    def layers(self, algorithm: str, forms: WeightFormats, promote: Promote | None = None) -> QuantizedLayers:
        """Quantize the weights layer by layer with an algorithm that needs calibration.

        The weights that ``promote`` selects get 8 bits.
        """

    def kept(self, algorithm: str, forms: WeightFormats) -> CachedParts | None:
        """Return where an algorithm that needs no text keeps what it makes, until the graph is written."""

    def smoothing(self, *, norms: bool = True) -> dict[str, Floats]:
        """Return the SmoothQuant divisors of channels by value, with or without those of norms' outputs."""

    def ranges(self, calibrator: str, factors: Mapping[str, Floats]) -> dict[str, float]:
        """Return the calibrated range (largest magnitude to represent) by value."""

    def beyond(self, dtype: ir.DataType) -> list[str]:
        """Return the values that exceed the range of a 16-bit type."""

    def sensitive_layers(
        self, max_error: float, rounding: Rounding, factors: Mapping[str, Floats], form: BlockFormat | None
    ) -> tuple[list[str], list[str]]:
        """Return weights whose products have a relative error above ``max_error``.

        Returns:
            Those weights, and the ones for which even ``form`` exceeds it.
        """


class Method(abc.ABC):
    """A quantization method.

    Attributes:
        name: its name in recipes and flags.
        summary: one line of help.
        settings: the recipe's fields that it uses; the others must keep their defaults.
        needs_text: whether it always needs a calibration text.
    """

    name: str
    summary: str
    settings: frozenset[str] = frozenset()
    needs_text: bool = False

    def needs_measurements(self, recipe: QuantizationRecipe) -> bool:
        """Return whether the recipe's settings need a calibration text with this method."""
        del recipe
        return self.needs_text

    @abc.abstractmethod
    def passes(self, recipe: QuantizationRecipe, measured: Measurements | None) -> Made:
        """Return the passes in order, and the entries of the package's record.

        Args:
            recipe: the checked settings.
            measured: None if the model cannot be run, for example during export.

        Raises:
            UsageError: a setting is out of range, or a measurement is needed and ``measured`` is None.
        """

    def measurements(self, measured: Measurements | None) -> Measurements:
        """Return ``measured``.

        Raises:
            UsageError: ``measured`` is None.
        """
        from ...errors import UsageError

        if measured is None:
            raise UsageError(
                f"method {self.name} needs calibration; use: carryall quantize IN OUT --method {self.name}"
            )
        return measured
