"""The CPU through ONNX Runtime: GroupQueryAttention and MatMulNBits on slots of reserved memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..graph_opt.lower.kernels import CPU
from . import machine, ort
from .ort_provider import OrtProvider


class CpuProvider(OrtProvider):
    """Any processor that ONNX Runtime has kernels for (x86-64, arm64).

    Options:
        spinning: threads wait for work busily, which shortens every step and heats idle cores for a moment.
        kv_cache: ``int8`` or ``float32``; ``auto`` is int8 where the model has scales for it.
    """

    name = "cpu"
    execution_provider = ort.CPU
    kernels = CPU
    options: ClassVar[Mapping[str, Any]] = {"spinning": True, "kv_cache": "auto"}

    def session_entries(self, options: Mapping[str, Any]) -> dict[str, str]:
        """Portable int4 graphs compute in int8, as lowered ones do."""
        return {
            "session.intra_op.allow_spinning": str(int(options["spinning"])),
            "session.qdq_matmulnbits_accuracy_level": str(self.kernels.accuracy_level),
        }

    def num_threads(self) -> int:
        """One a physical core that this process may use."""
        return machine.usable_cores()


PROVIDER = CpuProvider
