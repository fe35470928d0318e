"""The CPU through ONNX Runtime: GroupQueryAttention and MatMulNBits on slots of reserved memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import onnx_ir as ir

from ..graph_opt.lower.kernels import CPU
from ..graph_opt.lower.slots import slot_passes
from ..runtime.errors import ProviderUnavailableError
from . import machine, ort
from .base import Runner, RunnerConfig
from .ort_provider import OrtProvider
from .slot_policy import SlotPolicy
from .slot_runner import SlotRunner

_WIDE = "wide.onnx"
_NARROW = 12  # for fewer rows int8 weights take longer to read than 4-bit ones to unpack
_WIDE_PIECE = 256  # tokens; 5 to 7 % faster than 128
# How steps are cut where int8 products read prompts.
WIDE_POLICY = SlotPolicy(narrow_rows=_NARROW, narrow_tokens=_NARROW, prefill_chunk=_WIDE_PIECE)
_VNNI = frozenset({"avx_vnni", "avx512_vnni"})


class CpuProvider(OrtProvider):
    """Any processor that ONNX Runtime has kernels for (x86-64, arm64).

    Options:
        spinning: threads wait for work busily, which shortens every step and heats idle cores for a moment.
        kv_cache: ``int8`` or ``float32``; ``auto`` is int8 where the model has scales for it.
        wide_products: prompts, and steps of more than 12 sequences, compute products with int4 and int8
            weights in int8: prompts take two thirds of the time. A second graph holds these weights, one byte
            each. It needs VNNI or an ARM core.
    """

    name = "cpu"
    execution_provider = ort.CPU
    kernels = CPU
    options: ClassVar[Mapping[str, Any]] = {
        "spinning": True,
        "kv_cache": "auto",
        "wide_products": False,
    }

    def companions(self, config: RunnerConfig) -> Mapping[str, list[ir.passes.PassBase]]:
        """The graph for runs of several tokens, if it is asked for."""
        if not config.options.get("wide_products"):
            return {}
        options = dataclasses.replace(self._slot_options(config), wide_products=True)
        return {_WIDE: slot_passes(options)}

    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        """Load a graph lowered by ``passes``, and the one for runs of several tokens if it is asked for.

        Raises:
            ProviderUnavailableError: ``wide_products`` without the instructions that it needs.
        """
        if not config.options.get("wide_products"):
            return super().runner(model, config)
        features = machine.describe_machine().features
        if "avx2" in features and not _VNNI & set(features):
            raise ProviderUnavailableError(
                "wide_products needs VNNI instructions, which this CPU lacks: int8 sums would overflow"
            )
        wide, narrow = (self._open(path, config, generating=True) for path in (model.with_name(_WIDE), model))
        return SlotRunner(wide, config, str(model), policy=WIDE_POLICY, decode_session=narrow)

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
