"""The provider ``cpu`` with carryall's kernels and KV in blocks by default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from carryall.providers.targets.cpu import CpuOptions, CpuProvider


@dataclass(frozen=True, kw_only=True)
class _PagedOptions(CpuOptions):
    kernels: Literal["auto", "carryall", "onnxruntime"] = "carryall"
    kv_memory: Literal["auto", "paged", "explicit"] = "paged"


class PagedCpu(CpuProvider):
    """It needs the fixture ``kernels_of_this_machine``."""

    label = "cpu-paged"
    options: ClassVar[type[Any]] = _PagedOptions
