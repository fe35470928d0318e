"""The quantization recipe: a method and its settings, which can be stored and repeated."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from ...errors import UsageError
from ...options import Checked, option
from ...records import dataclass
from ..passes.base import GraphPass
from .algorithms.blockwise import BLOCK_SIZES
from .calibration.activations import MIN_TOKENS
from .calibration.calibrators import CALIBRATORS
from .formats.kv_cache import KV_FORMATS
from .method import Made, Measurements, Method
from .methods import METHODS
from .weight_methods import ALGORITHMS, EMBEDDING_BITS

NO_METHOD = "none"
_MAX_BITS = 32


@dataclass(frozen=True, slots=True)
class QuantizationRecipe(Checked):
    """How to quantize a model. Settings that are None get the method's default.

    Args:
        method: format of the weights; 'none' does not quantize them.
        block_size: number of weights that share a scale. Smaller blocks are more accurate and need
            more bytes. A layer whose input size is not a multiple of it gets the next smaller block
            size that fits.
        symmetric: symmetric (without zero points) or asymmetric weights. [default: int8-fast
            symmetric; others asymmetric]
        algorithm: rounding algorithm. rtn: round to nearest. kquant, hqq: with fitted ranges. awq,
            gptq: minimise the error of products on a calibration text; they take minutes. [default:
            int4 gptq; int8 awq+gptq; int4-fast kquant; int8-fast rtn]
        rotate: With int4, int8: rotate the residual stream, which makes channels equally large, so
            that rounding activations to int8 loses less. The float results do not change. [default:
            int8 yes; others no]
        embedding: format of the embedding and of a tied head. [default: int8]
        promote: With int4: additional bytes, as a share, to store layers in 8 bits: keys, values and
            outlying feed-forward layers, then the kinds of layers whose rounding costs most, measured
            on the text. [default: int4 0.12; int4-fast the former without a text; none with 0]
        budget: With int4, int8: mean bits per weight including scales, such as 4.5bits. The most
            sensitive layers get more bits.
        max_kl: With int4, int8: find the smallest mix of int4, int8 and float layers whose KL
            divergence from the float model is at most this, in nats.
        smooth: move large activation channels into the weights (SmoothQuant); with int4, int8 only
            inside of gated MLPs. [default: int8 yes; others no]
        max_error: With int8-dynamic, int8-static: layers whose relative error is above this, such as
            0.05, keep float activations.
        calibrator: With int8-static: the method that selects the ranges of activations. [default:
            mse]
        kv: store the KV cache in 8 bits with calibrated scales: int8 per channel, int8-tensor per
            tensor.
        calibration: text file, or .jsonl file of prompts, for calibration. [default: a built-in text]
        calibration_tokens: maximum number of tokens of the text to use. [default: 4096
            to round weights, else 8192]

    Raises:
        UsageError: a setting is out of range, has no effect, or contradicts another.
    """

    method: str = option("int4", choices=(*METHODS, NO_METHOD))
    block_size: int | None = option(None, choices=BLOCK_SIZES)
    symmetric: bool | None = option(None, flags=("--symmetric/--asymmetric",))
    algorithm: str | None = option(None, choices=ALGORITHMS)
    rotate: bool | None = None
    embedding: str | None = option(None, choices=tuple(EMBEDDING_BITS))
    promote: float | None = option(None, least=0, most=1)
    budget: float | None = option(None, above=0, most=_MAX_BITS, unit="bits")
    max_kl: float | None = option(None, above=0, most=1e6)
    smooth: bool | None = None
    max_error: float | None = option(None, least=0, most=1)
    calibrator: str | None = option(None, choices=tuple(CALIBRATORS))
    kv: str | None = option(None, choices=tuple(KV_FORMATS))
    calibration: str | None = None
    calibration_tokens: int | None = option(None, least=MIN_TOKENS, most=1 << 30)

    def __post_init__(self) -> None:
        if isinstance(self.calibration, Path):
            object.__setattr__(self, "calibration", str(self.calibration))  # as JSON keeps it
        Checked.__post_init__(self)
        if self.method == NO_METHOD and self.kv is None:
            raise UsageError("the recipe does nothing: choose a method, or kv int8")
        self._check_effects()
        if self.budget is not None and self.max_kl is not None:
            raise UsageError("budget and max_kl exclude each other; choose one")
        if (self.calibration is not None or self.calibration_tokens is not None) and not self.needs_text:
            raise UsageError(
                "calibration has no effect here; it is used by kv, int8-static, the algorithms awq and gptq, "
                "budget, max_kl, smooth and max_error"
            )

    def _check_effects(self) -> None:
        """Raise UsageError for settings that the method does not use."""
        known = {name for method in METHODS.values() for name in method.settings}
        taken = METHODS[self.method].settings if self.method in METHODS else frozenset()
        for one in dataclasses.fields(self):
            if one.name in known - taken and getattr(self, one.name) != one.default:
                users = ", ".join(name for name, method in METHODS.items() if one.name in method.settings)
                raise UsageError(f"{one.name} has no effect with method {self.method}; it is for: {users}")

    @property
    def needs_text(self) -> bool:
        """Whether a calibration text is needed."""
        method = METHODS.get(self.method)
        measured = (self.kv, self.budget, self.max_kl, self.max_error)
        return (
            any(one is not None for one in measured)
            or bool(self.smooth)
            or (method is not None and method.needs_measurements(self))
        )

    def passes(self, measured: Measurements | None = None) -> Made:
        """Return the quantization passes in order, and the entries of the package's record.

        Args:
            measured: measurements of the float model; None if it cannot be run.

        Raises:
            UsageError: a measurement is needed and ``measured`` is None, or a budget cannot be met.
        """
        passes: list[GraphPass] = []
        record: dict[str, Any] = {}
        if self.kv is not None:
            if measured is None:
                raise UsageError(
                    "an int8 KV cache needs calibration; use: carryall quantize IN OUT --kv int8"
                )
            passes.append(measured.kv_pass(per_tensor=KV_FORMATS[self.kv]))
            record["kv_cache"] = self.kv
        if self.method in METHODS:
            method: Method = METHODS[self.method]
            made, facts = method.passes(self, measured)
            passes, record = [*passes, *made], {**record, **facts}
        return passes, {**record, "recipe": self.to_dict()}

    def to_dict(self) -> dict[str, Any]:
        """Return the method, and the settings that differ from their defaults."""
        given = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        defaults = {one.name: one.default for one in dataclasses.fields(self)}
        return {name: value for name, value in given.items() if name == "method" or value != defaults[name]}

    def to_json(self) -> str:
        """Return the recipe as JSON text."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Return the recipe of which ``settings`` is the ``to_dict``.

        Raises:
            UsageError: a setting is unknown or out of range.
        """
        unknown = sorted(set(settings) - {one.name for one in dataclasses.fields(cls)})
        if unknown:
            names = ", ".join(one.name for one in dataclasses.fields(cls))
            raise UsageError(f"unknown recipe setting '{unknown[0]}'; the settings are: {names}")
        return cls(**settings)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the recipe of which ``text`` is the ``to_json``.

        Raises:
            UsageError: the text is not JSON, or a setting is unknown or out of range.
        """
        try:
            settings = json.loads(text)
        except ValueError as error:
            raise UsageError(f"the recipe is not JSON: {error}") from error
        if not isinstance(settings, dict):
            raise UsageError(f"a recipe must be a JSON object of settings, found {settings!r}")
        return cls.from_dict(settings)
