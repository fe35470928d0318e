"""Quantization methods by the names that users give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...runtime.errors import UsageError
from ..passes.base import GraphPass
from .blockwise import BlockFormat
from .dynamic_int8 import DynamicQuantizationPass
from .weight_only import WeightOnlyQuantizationPass

METHODS: dict[str, BlockFormat] = {
    "int4": BlockFormat(bits=4, block_size=128),
    "int8": BlockFormat(bits=8, block_size=128),
    "int8-dynamic": BlockFormat(bits=8, block_size=128),
}
_PASSES: dict[str, Callable[[BlockFormat], GraphPass]] = {
    "int4": WeightOnlyQuantizationPass,
    "int8": WeightOnlyQuantizationPass,
    "int8-dynamic": DynamicQuantizationPass,
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """A method and its settings."""

    method: str
    form: BlockFormat

    def quantizer(self) -> GraphPass:
        """Return the pass that does it."""
        return _PASSES[self.method](self.form)

    def record(self) -> dict[str, Any]:
        """Return what a package's record says about it."""
        return {"method": self.method, **dataclasses.asdict(self.form)}


def quantization(
    method: str, *, block_size: int | None = None, symmetric: bool | None = None
) -> Quantization:
    """Look a method up; settings that are not given are the method's own.

    Raises:
        UsageError: there is no such method, or a setting is out of range.
    """
    if method not in METHODS:
        raise UsageError(f"unknown quantization method '{method}'; the methods are: {', '.join(METHODS)}")
    given = {"block_size": block_size, "symmetric": symmetric}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return Quantization(method, dataclasses.replace(METHODS[method], **changes))
