"""Quantization methods by the names that users give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from ...errors import UsageError
from ..passes.base import GraphPass
from .algorithms import hqq, kquant
from .algorithms.blockwise import BlockFormat, Quantizer, round_to_nearest
from .formats.dynamic_int8 import DynamicQuantizationPass
from .formats.half import HALF_TYPES, HalfPrecisionPass
from .formats.static_int8 import StaticQuantizationPass
from .formats.weight_only import Forms, WeightOnlyQuantizationPass
from .search.calibrated import CALIBRATED, QuantizedLayers

METHODS: dict[str, BlockFormat | None] = {
    "int4": BlockFormat(bits=4, block_size=128),
    "int8": BlockFormat(bits=8, block_size=32),
    "int8-dynamic": BlockFormat(bits=8, block_size=32),
    "int8-static": BlockFormat(bits=8, block_size=32),
    **dict.fromkeys(HALF_TYPES),
}
UNCALIBRATED: dict[str, Quantizer] = {
    "rtn": round_to_nearest,
    "hqq": hqq.quantize,
    "kquant": kquant.quantize,
}
ALGORITHMS = (*UNCALIBRATED, *CALIBRATED)
_DYNAMIC, _STATIC = "int8-dynamic", "int8-static"
_BITS = {"int4": 4, "int8": 8}
FLOAT = "float"
EMBEDDINGS = (*_BITS, FLOAT)


@dataclass(frozen=True, slots=True)
class Quantization:
    """A method and its settings.

    Args:
        method: one of ``METHODS``.
        form: how weights are stored; None for fp16 and bf16.
        algorithm: how they are rounded, one of ``ALGORITHMS``.
        embedding: format of the embedding; None takes ``form``.
        overrides: formats of single weights; None leaves one float.
        float_embedding: the embedding, and a head tied to it, stay float.
    """

    method: str
    form: BlockFormat | None
    algorithm: str = "rtn"
    embedding: BlockFormat | None = None
    overrides: Mapping[str, BlockFormat | None] = field(default_factory=dict)
    float_embedding: bool = False

    @property
    def needs_calibration(self) -> bool:
        """Whether ``quantizer`` needs the results of a walk on calibration text."""
        return self.algorithm in CALIBRATED

    @property
    def weight_only(self) -> bool:
        """Whether weights are all it quantizes, each in a format of its own."""
        return self.form is not None and not self.computes_in_integers

    @property
    def forms(self) -> Forms:
        """Which format each weight gets.

        Raises:
            UsageError: the method does not quantize weights.
        """
        if self.form is None:
            raise UsageError(f"method {self.method} does not quantize weights")
        return Forms(self.form, self.embedding, self.overrides, self.float_embedding)

    @property
    def computes_in_integers(self) -> bool:
        """Whether activations are quantized too, so that layers may be excluded."""
        return self.method in (_DYNAMIC, _STATIC)

    @property
    def needs_ranges(self) -> bool:
        """Whether ``quantizer`` needs ranges of the activations."""
        return self.method == _STATIC

    @property
    def half_type(self) -> ir.DataType | None:
        """The 16-bit type that a method converts to, None for those that quantize."""
        return HALF_TYPES.get(self.method)

    def quantizer(
        self,
        layers: QuantizedLayers | None = None,
        *,
        ranges: Mapping[str, float] | None = None,
        exclude: Collection[str] = (),
    ) -> GraphPass:
        """Return the pass that does it.

        Args:
            layers: what a calibrated algorithm found.
            ranges: of the activations of the float model, for static int8.
            exclude: weights whose activations stay float where a method quantizes them; values that stay
                float where a method converts to 16 bits.

        Raises:
            UsageError: static int8 lacks its ranges.
        """
        if self.form is None:
            return HalfPrecisionPass(HALF_TYPES[self.method], keep_float=exclude)
        if self.needs_ranges:
            if ranges is None:
                raise UsageError(
                    f"{_STATIC} needs a calibration: carryall quantize IN OUT --method {_STATIC}"
                )
            return StaticQuantizationPass(self.form, ranges, exclude=exclude, overrides=self.overrides)
        if self.computes_in_integers:
            return DynamicQuantizationPass(self.form, exclude=exclude, overrides=self.overrides)
        return WeightOnlyQuantizationPass(
            self.form,
            embedding=self.embedding,
            overrides=self.overrides,
            float_embedding=self.float_embedding,
            quantizer=UNCALIBRATED.get(self.algorithm, round_to_nearest),
            calibrated=None if layers is None else layers.quantizer,
        )

    def record(self) -> dict[str, Any]:
        """Return what a package's record says about it."""
        facts: dict[str, Any] = {"method": self.method}
        if self.form is not None:
            facts |= dataclasses.asdict(self.form)
        if self.algorithm != "rtn":
            facts["algorithm"] = self.algorithm
        if self.embedding is not None:
            facts["embedding_bits"] = self.embedding.bits
        if self.float_embedding:
            facts["embedding_bits"] = 32
        return facts


def quantization(
    method: str,
    *,
    block_size: int | None = None,
    symmetric: bool | None = None,
    algorithm: str = "rtn",
    embedding: str | None = None,
) -> Quantization:
    """Look a method up; settings that are not given are the method's own.

    Algorithms other than ``rtn`` use zero points, which cost no time, and keep the embedding in int8.

    Raises:
        UsageError: there is no such method, or a setting is out of range.
    """
    if method not in METHODS:
        raise UsageError(f"unknown quantization method '{method}'; the methods are: {', '.join(METHODS)}")
    if algorithm not in ALGORITHMS:
        raise UsageError(f"unknown algorithm '{algorithm}'; the algorithms are: {', '.join(ALGORITHMS)}")
    if method in (_DYNAMIC, _STATIC) and (algorithm != "rtn" or embedding is not None):
        raise UsageError(f"method {method} has neither algorithms nor a format of the embedding")
    if algorithm != "rtn":
        symmetric, embedding = bool(symmetric), embedding or "int8"
    given = {"block_size": block_size, "symmetric": symmetric}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    base = METHODS[method]
    if base is None:
        if changes or algorithm != "rtn" or embedding is not None:
            raise UsageError(f"method {method} has neither blocks, algorithms nor a format of the embedding")
        return Quantization(method, None)
    form = dataclasses.replace(base, **changes)
    own = dataclasses.replace(form, bits=_BITS[embedding]) if embedding in _BITS else None
    return Quantization(method, form, algorithm, own, float_embedding=embedding == FLOAT)
