"""The quantization methods by name. To add one, write its file and add it here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from .method import Method

# By name, the module whose ``METHODS`` has it.
_HOME = {
    **dict.fromkeys(("int4", "int4-fast", "int8", "int8-fast"), "weight_methods"),
    **dict.fromkeys(("int8-dynamic", "int8-static"), "integer_methods"),
    **dict.fromkeys(("fp16", "bf16"), "half_methods"),
}


class _Methods(Mapping[str, "Method"]):
    """Imports a method when it is looked up: options list the names where nothing is quantized."""

    def __getitem__(self, name: str) -> Method:
        return cast("Method", importlib.import_module(f".{_HOME[name]}", __package__).METHODS[name])

    def __iter__(self) -> Iterator[str]:
        return iter(_HOME)

    def __len__(self) -> int:
        return len(_HOME)


METHODS: Mapping[str, Method] = _Methods()
