"""The provider ``cpu``: ONNX Runtime's GroupQueryAttention and MatMulNBits kernels, KV in slots."""

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
from ...graph_opt.lower.products.block_minima import weight_with_minima
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
_NARROW = 12  # rows; for fewer, reading int8 weights takes longer than unpacking 4-bit ones
_WIDE_CHUNK = 512  # tokens; 7 % faster than 128, with fewer short last chunks (16 tokens cost as much as 40)
WIDE_POLICY = SlotPolicy(narrow_rows=_NARROW, narrow_tokens=_NARROW, prefill_chunk=_WIDE_CHUNK)
_NARROW_BITS = 4  # for 8-bit weights, int8 activations lose more than the rounding of the weights did
_SHARE = 0.25  # of the available memory that the second copy of the weights may take
_VNNI = frozenset({"avx_vnni", "avx512_vnni"})


@dataclass(frozen=True, kw_only=True)
class CpuOptions(Checked):
    """Options of the provider.

    Args:
        spinning: threads spin while they wait for work, which shortens steps and keeps idle cores busy
            briefly.
        kv_cache: ``int8`` or ``float32``; ``auto`` is int8 if the model has scales for it.
        wide_products: ``on`` computes matrix products of prompts, and of steps with more than 12 sequences,
            in int8, in half to two thirds of the time. A second graph holds the int4 and int8 weights with
            one byte each. It needs VNNI or an ARM core. ``auto`` is on for int4 weights if the CPU has VNNI
            and twice these bytes fit into a quarter of the free memory; ``off`` saves the memory.
    """

    spinning: bool = True
    kv_cache: Literal["auto", "int8", "float32"] = "auto"
    wide_products: Literal["auto", "on", "off"] = "auto"


class CpuProvider(OrtProvider):
    """Any processor with ONNX Runtime kernels (x86-64, arm64)."""

    name = "cpu"
    execution_provider = ort.CPU
    kernels = CPU
    options: ClassVar[type[Any]] = CpuOptions

    def resolve_options(self, config: RunnerConfig, graph: Callable[[], ir.Model]) -> RunnerConfig:
        """Decide ``wide_products=auto`` by the weights, the CPU and the free memory."""
        if self.checked_options(config.options)["wide_products"] != "auto":
            return config
        size, facts = wide_bytes(graph().graph), machine.describe_machine()
        fits = 2 * size <= facts.memory_available * _SHARE
        wide = size > 0 and fits and bool(_VNNI & set(facts.features))
        if wide:
            _log.info(
                "wide_products is on: prompts are computed in int8, which takes %d MB more memory",
                size // 10**6,
            )
        return dataclasses.replace(
            config, options={**config.options, "wide_products": "on" if wide else "off"}
        )

    def companions(self, config: RunnerConfig) -> Mapping[str, list[ir.passes.PassBase]]:
        """Return the graph for runs of many tokens, if ``wide_products`` is on."""
        if config.options.get("wide_products") != "on":
            return {}
        options = dataclasses.replace(self._slot_options(config), wide_products=True)
        return {_WIDE: slot_passes(options)}

    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        """Load a graph lowered by ``passes``, and the one for runs of many tokens if ``wide_products`` is on.

        Raises:
            ProviderUnavailableError: ``wide_products`` is on, and the CPU lacks VNNI.
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
        """Return the session entries for threads, and for int8 accuracy of portable int4 graphs."""
        return {
            "session.intra_op.allow_spinning": str(int(options["spinning"])),
            # With two graphs, spinning threads of one would occupy the cores of the other.
            "session.force_spinning_stop": str(int(options["wide_products"] == "on")),
            "session.qdq_matmulnbits_accuracy_level": str(self.kernels.accuracy_level),
        }

    def num_threads(self) -> int:
        """Return the number of physical cores that this process may use."""
        return machine.usable_cores()


def wide_bytes(graph: ir.Graph) -> int:
    """Return the bytes of the second copy of a portable graph's weights; 0 if it would not pay.

    It does not pay if most weights are not int4, or for a mixture of experts, whose experts see few tokens
    each and run in one operator on the stored weights.
    """
    found = [_blocked(node.inputs[1]) for node in nodes_of(graph, "MatMul")]
    weights = [one for one in found if isinstance(one, BlockedWeight)]
    if any(nodes_of(graph, "TopK")):
        return 0
    narrow = sum(one.inputs * one.outputs for one in weights if one.bits == _NARROW_BITS)
    every = sum(one.inputs * one.outputs for one in weights)
    return every if 2 * narrow > every else 0


def _blocked(value: ir.Value | None) -> BlockedWeight | str | None:
    added = weight_with_minima(value)
    return blocked_weight(value) if added is None else added.blocked


PROVIDER = CpuProvider
