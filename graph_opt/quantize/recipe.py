"""The quantization recipe: a method and its settings, which can be stored and repeated."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ...errors import UsageError
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


def _setting(
    default: Any,
    text: str,
    *,
    choices: tuple[Any, ...] = (),
    above: float | None = None,
    least: float | None = None,
    most: float = math.inf,
) -> Any:
    """Declare a field with its help and valid values: ``choices``, or a number > above, >= least, <= most."""
    limits = {"choices": choices, "above": above, "least": least, "most": most}
    return field(default=default, metadata={"help": text, **limits})


@dataclass(frozen=True, slots=True)
class QuantizationRecipe:
    """How to quantize a model. Settings that are None get the method's default.

    Raises:
        UsageError: a setting is out of range, has no effect, or contradicts another.
    """

    method: str = _setting(
        "int4",
        "Format of the weights; 'none' does not quantize them.",
        choices=(*METHODS, NO_METHOD),
    )
    block_size: int | None = _setting(
        None,
        "Number of weights that share a scale. Smaller blocks are more accurate and need more bytes. A layer "
        "whose input size is not a multiple of it gets the next smaller block size that fits.",
        choices=BLOCK_SIZES,
    )
    symmetric: bool | None = _setting(
        None,
        "Symmetric (without zero points) or asymmetric weights.  [default: int8-fast symmetric; others "
        "asymmetric]",
    )
    algorithm: str | None = _setting(
        None,
        "Rounding algorithm. rtn: round to nearest. kquant, hqq: with fitted ranges. awq, gptq: minimise the "
        "error of products on a calibration text; they take minutes.  [default: int4, int8 awq+gptq; "
        "int4-fast kquant; int8-fast rtn]",
        choices=ALGORITHMS,
    )
    rotate: bool | None = _setting(
        None,
        "With int4, int8: rotate the residual stream, which makes channels equally large, so that rounding "
        "activations to int8 loses less. The float results do not change.  [default: int4, int8 yes; "
        "others no]",
    )
    embedding: str | None = _setting(
        None,
        "Format of the embedding and of a tied head.  [default: int8]",
        choices=tuple(EMBEDDING_BITS),
    )
    promote: float | None = _setting(
        None,
        "With int4: additional bytes, as a share, to store the kinds of layers whose rounding costs most in "
        "8 bits.  [default: int4 0.12, int4-fast 0]",
        least=0,
        most=1,
    )
    budget: float | None = _setting(
        None,
        "With int4, int8: mean bits per weight including scales, such as 4.5bits. The most sensitive layers "
        "get more bits.",
        above=0,
        most=_MAX_BITS,
    )
    max_kl: float | None = _setting(
        None,
        "With int4, int8: find the smallest mix of int4, int8 and float layers whose KL divergence from the "
        "float model is at most this, in nats.",
        above=0,
    )
    smooth: bool | None = _setting(
        None,
        "Move large activation channels into the weights (SmoothQuant); with int4, int8 only inside of gated "
        "MLPs.  [default: int4, int8 yes; others no]",
    )
    max_error: float | None = _setting(
        None,
        "With int8-dynamic, int8-static: layers whose relative error is above this, such as 0.05, keep float "
        "activations.",
        least=0,
        most=1,
    )
    calibrator: str | None = _setting(
        None,
        "With int8-static: the method that selects the ranges of activations.  [default: mse]",
        choices=tuple(CALIBRATORS),
    )
    kv: str | None = _setting(
        None,
        "Store the KV cache in 8 bits with calibrated scales: int8 per channel, int8-tensor per tensor.",
        choices=tuple(KV_FORMATS),
    )
    calibration: str | None = _setting(
        None, "Text file, or .jsonl file of prompts, for calibration.  [default: a built-in text]"
    )
    calibration_tokens: int | None = _setting(
        None,
        "Number of tokens of the text to use.  [default: 8192; awq and gptq 16384]",
        least=MIN_TOKENS,
        most=1 << 30,
    )

    def __post_init__(self) -> None:
        if isinstance(self.calibration, Path):
            object.__setattr__(self, "calibration", str(self.calibration))  # as JSON keeps it
        for one in dataclasses.fields(self):
            _check_value(one.name, getattr(self, one.name), one.metadata)
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


def _check_value(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    if value is None and name != "method":
        return
    choices, above, least, most = (limits[key] for key in ("choices", "above", "least", "most"))
    if choices:
        if value not in choices:
            raise UsageError(f"{name} must be one of {', '.join(map(str, choices))}, found {value!r}")
    elif above is not None or least is not None:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value > most or (least is None and value <= above) or value < (least or 0):
            bounds = f"above {above:g}" if least is None else f"at least {least:g}"
            end = f" and at most {most:g}" if math.isfinite(most) else ""
            raise UsageError(f"{name} must be a number {bounds}{end}, found {value!r}")
    elif name in ("smooth", "symmetric", "rotate") and not isinstance(value, bool):
        raise UsageError(f"{name} must be true or false, found {value!r}")
    elif name == "calibration" and not isinstance(value, str | Path):
        raise UsageError(f"calibration must be the path of a text file, found {value!r}")
