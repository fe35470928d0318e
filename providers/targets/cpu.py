"""The CPU through ONNX Runtime: GroupQueryAttention and MatMulNBits on slots of reserved memory."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import onnx_ir as ir

from ...errors import ProviderUnavailableError
from ...graph_opt.graph.edit import nodes_of
from ...graph_opt.lower.kernels import CPU
from ...graph_opt.lower.pipelines.slots import slot_passes
from ...graph_opt.lower.products.blocked_weight import BlockedWeight, blocked_weight
from ...options import Checked
from ..base import Runner, RunnerConfig
from ..host import machine
from ..ort import ort
from ..ort.provider import OrtProvider
from ..ort.slot_policy import SlotPolicy
from ..ort.slot_runner import SlotRunner

_log = logging.getLogger(__name__)

_WIDE = "wide.onnx"
_NARROW = 12  # for fewer rows int8 weights take longer to read than 4-bit ones to unpack
_WIDE_PIECE = 512  # tokens; 7 % faster than 128, and rests are rarer: one of 16 tokens costs as much as 40
# How steps are cut where int8 products read prompts.
WIDE_POLICY = SlotPolicy(narrow_rows=_NARROW, narrow_tokens=_NARROW, prefill_chunk=_WIDE_PIECE)
_NARROW_BITS = 4  # what 8-bit weights lose by products in int8 is more than they lost by being rounded
_SHARE = 0.25
_VNNI = frozenset({"avx_vnni", "avx512_vnni"})


@dataclass(frozen=True, kw_only=True)
class CpuOptions(Checked):
    """Options of the provider.

    Args:
        spinning: threads wait for work busily, which shortens every step and heats idle cores for a moment.
        kv_cache: ``int8`` or ``float32``; ``auto`` is int8 where the model has scales for it.
        wide_products: ``on``: prompts, and steps of more than 12 sequences, compute products with int4 and
            int8 weights in int8, in half to two thirds of the time. A second graph holds these weights, one
            byte each. It needs VNNI or an ARM core. ``auto`` is on for int4 weights, where the CPU has VNNI
            and a quarter of the free memory holds them twice; ``off`` saves that memory.
    """

    spinning: bool = True
    kv_cache: Literal["auto", "int8", "float32"] = "auto"
    wide_products: Literal["auto", "on", "off"] = "auto"


class CpuProvider(OrtProvider):
    """Any processor that ONNX Runtime has kernels for (x86-64, arm64)."""

    name = "cpu"
    execution_provider = ort.CPU
    kernels = CPU
    options: ClassVar[type[Any]] = CpuOptions

    def resolve_options(self, config: RunnerConfig, graph: Callable[[], ir.Model]) -> RunnerConfig:
        """Decide whether ``wide_products`` pay, unless the caller said so."""
        if self.checked_options(config.options)["wide_products"] != "auto":
            return config
        size, facts = wide_bytes(graph().graph), machine.describe_machine()
        fits = 2 * size <= facts.memory_available * _SHARE
        wide = size > 0 and fits and bool(_VNNI & set(facts.features))
        if wide:
            _log.info("prompts are computed in int8, for %d MB of memory (wide_products=off)", size // 10**6)
        return dataclasses.replace(
            config, options={**config.options, "wide_products": "on" if wide else "off"}
        )

    def companions(self, config: RunnerConfig) -> Mapping[str, list[ir.passes.PassBase]]:
        """The graph for runs of several tokens, if it is asked for."""
        if config.options.get("wide_products") != "on":
            return {}
        options = dataclasses.replace(self._slot_options(config), wide_products=True)
        return {_WIDE: slot_passes(options)}

    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        """Load a graph lowered by ``passes``, and the one for runs of several tokens if it is asked for.

        Raises:
            ProviderUnavailableError: ``wide_products`` without the instructions that it needs.
        """
        if config.options.get("wide_products") != "on":
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
            # Two graphs run in turn: threads of one that still spin would hold the cores of the other.
            "session.force_spinning_stop": str(int(options["wide_products"] == "on")),
            "session.qdq_matmulnbits_accuracy_level": str(self.kernels.accuracy_level),
        }

    def num_threads(self) -> int:
        """One a physical core that this process may use."""
        return machine.usable_cores()


def wide_bytes(graph: ir.Graph) -> int:
    """Bytes of the second copy of a portable graph's int4 weights; 0 where that would not pay.

    A mixture's experts see few tokens each, and one operator computes them all only as they are stored.
    """
    found = [blocked_weight(node.inputs[1]) for node in nodes_of(graph, "MatMul")]
    weights = [one for one in found if isinstance(one, BlockedWeight)]
    if any(nodes_of(graph, "TopK")):
        return 0
    narrow = sum(one.inputs * one.outputs for one in weights if one.bits == _NARROW_BITS)
    every = sum(one.inputs * one.outputs for one in weights)
    return every if 2 * narrow > every else 0


PROVIDER = CpuProvider
