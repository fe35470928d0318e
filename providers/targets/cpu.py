"""The provider ``cpu``: ONNX Runtime with its own kernels and those of ``providers/native``, KV in slots."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...contract import SEQLENS_K
from ...errors import CarryallWarning, ProviderUnavailableError, UsageError
from ...graph_opt.lower.kernels import CPU, Kernels
from ...options import Checked
from ..base import Runner, RunnerConfig
from ..host import machine
from ..host.tuning import Tuning, stored_tuning, tuned_kernels
from ..native.library import BUILD, PORTABLE, UNPROVEN, find_library
from ..ort import ort
from ..ort.device_memory import Device
from ..ort.explicit import OrtExplicitSession
from ..ort.host_paged import host_paged_runner, is_host_paged
from ..ort.provider import OrtProvider, is_paged
from ..ort.slot_policy import SlotPolicy
from ..ort.slot_runner import SlotRunner
from ..runners.explicit_runner import ExplicitRunner, warn_of_explicit_kv

if TYPE_CHECKING:
    import onnx_ir as ir

_log = logging.getLogger(__name__)

_WIDE = "wide.onnx"
_NARROW = 12  # rows; for fewer, reading int8 weights takes longer than unpacking 4-bit ones
_WIDE_CHUNK = 512  # tokens; 7 % faster than 128, with fewer short last chunks (16 tokens cost as much as 40)
WIDE_POLICY = SlotPolicy(narrow_rows=_NARROW, narrow_tokens=_NARROW, prefill_chunk=_WIDE_CHUNK)
OWN_POLICY = SlotPolicy(prefill_chunk=_WIDE_CHUNK)
CARRYALL = "carryall"  # the value of ``kernels``
_SLOW = (
    "carryall's CPU kernels are not built, so prompts take 6 to 9 times as long, and answers 2 to 3 times; "
    f"{BUILD}, or choose onnxruntime's: --provider-option kernels=onnxruntime"
)
_SHARE = 0.25  # of the available memory that the second copy of the weights may take


@dataclass(frozen=True, kw_only=True)
class CpuOptions(Checked):
    """Options of the provider.

    Args:
        spinning: threads spin while they wait for work, which shortens steps and keeps idle cores busy
            briefly.
        kv_cache: ``int8``, ``bfloat16`` (half the memory of float32; needs ``kv_memory=paged``) or
            ``float32``; ``auto`` is int8 if the model has scales for it; else, with ``kv_memory=paged``,
            int8 if weights have 4 bits and bfloat16 if they have 8; else float32.
        kernels: ``carryall`` computes products with int4 and int8 weights by carryall's own kernels, which
            must be built (``carryall doctor --build-kernels``); ``onnxruntime`` by its own. ``auto`` is
            ``carryall`` if they are there.
        wide_products: ``on`` computes matrix products of prompts, and of steps with more than 12 sequences,
            in int8 by a second graph, which holds the int4 and int8 weights with one byte each. It needs VNNI
            or an ARM core. ``auto`` is off with carryall's kernels: a prompt of 256 takes 1.1 times as long,
            and no row depends on the rows beside it. With onnxruntime's kernels it is on for int4 weights if
            the CPU has VNNI and twice these bytes fit into a quarter of the free memory.
        kv_memory: ``paged``: KV in blocks that sequences allocate as they grow, and share if their first
            tokens are equal; all rows of a step are one run. It needs carryall's kernels, which then compute
            attention too. ``slots``: a buffer of context length for each sequence, and onnxruntime's
            attention. ``auto`` is ``paged`` with carryall's kernels, except for heads of more than 512, and
            for models with a sliding window in some layers only, whose KV behind windows blocks cannot free,
            unless layers share caches, for which slots have no kernel.
    """

    spinning: bool = True
    kv_cache: Literal["auto", "int8", "bfloat16", "float32"] = "auto"
    kernels: Literal["auto", "carryall", "onnxruntime"] = "auto"
    wide_products: Literal["auto", "on", "off"] = "auto"
    kv_memory: Literal["auto", "slots", "paged"] = "auto"


class CpuProvider(OrtProvider):
    """Any processor with ONNX Runtime kernels (x86-64, arm64)."""

    name = "cpu"
    execution_provider = ort.CPU
    kernels = CPU
    options: ClassVar[type[Any]] = CpuOptions

    def graph_facts(self, graph: ir.Model) -> dict[str, Any]:
        """Return whether blocks suffice for the caches, and the size of a second copy of the weights."""
        from ...graph_opt.lower.pipelines.cpu_facts import blocks_suffice, wide_bytes

        return {"blocks_suffice": blocks_suffice(graph), "wide_bytes": wide_bytes(graph.graph)}

    def resolve_options(self, config: RunnerConfig, facts: Callable[[], Mapping[str, Any]]) -> RunnerConfig:
        """Decide ``kernels=auto`` by the library, ``wide_products=auto`` by weights, CPU and free memory.

        ``kv_memory=auto`` follows the kernels.

        Raises:
            ProviderUnavailableError: carryall's kernels are asked for or installed, but cannot be used.
        """
        options = self.checked_options(config.options)
        kernels, wide, memory = options["kernels"], options["wide_products"], options["kv_memory"]
        if kernels == "auto":
            kernels = CARRYALL if _has_fast_kernels() else "onnxruntime"
            if find_library() is None:
                warnings.warn(_SLOW, CarryallWarning, stacklevel=2)
        if kernels == CARRYALL:
            tuned_kernels()
        if memory == "paged" and kernels != CARRYALL:
            raise UsageError(f"kv_memory=paged needs carryall's kernels; {BUILD}")
        if memory == "auto":
            paged = kernels == CARRYALL and _has_fast_kernels() and facts()["blocks_suffice"]
            memory = "paged" if paged else "slots"
        if wide == "auto":
            wide = "on" if kernels != CARRYALL and _wide_products_pay(facts) else "off"
        settled = {"kernels": kernels, "wide_products": wide, "kv_memory": memory}
        return dataclasses.replace(config, options={**config.options, **settled})

    def companions(self, config: RunnerConfig) -> Mapping[str, list[ir.passes.PassBase]]:
        """Return the graph for runs of many tokens, if ``wide_products`` is on."""
        if config.options.get("wide_products") != "on":
            return {}
        from ...graph_opt.lower.pipelines.slots import slot_passes

        options = dataclasses.replace(self._slot_options(config), wide_products=True)
        return {_WIDE: slot_passes(options)}

    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        """Load a graph lowered by ``passes``, and the one for runs of many tokens if ``wide_products`` is on.

        Raises:
            ProviderUnavailableError: ``wide_products`` is on, and the CPU lacks VNNI.
        """
        session = self._open(model, config, generating=True)
        paged = is_host_paged(session)
        if not paged and SEQLENS_K not in {value.name for value in session.get_inputs()}:
            return self._explicit_runner(session, model, config)
        wide = self._open_wide(model, config)
        if paged:
            return host_paged_runner(session, config, str(model), wide=wide, narrow=_NARROW)
        if wide is None:
            own = config.options.get("kernels") == CARRYALL
            return SlotRunner(session, config, str(model), policy=OWN_POLICY if own else None)
        return SlotRunner(wide, config, str(model), policy=WIDE_POLICY, decode_session=session)

    def _open_wide(self, model: Path, config: RunnerConfig) -> Any:
        """Open the graph for runs of many tokens, if ``wide_products`` is on, else return None."""
        if config.options.get("wide_products") != "on":
            return None
        if not machine.has_exact_byte_sums():
            raise ProviderUnavailableError(
                "wide_products needs VNNI instructions, which this CPU lacks: int8 sums would overflow"
            )
        return self._open(model.with_name(_WIDE), config, generating=True)

    def explicit_passes(self, config: RunnerConfig) -> list[ir.passes.PassBase]:
        """Return the passes that keep attention and caches as they are, in order."""
        from ...graph_opt.lower.pipelines.slots import slot_passes

        return slot_passes(dataclasses.replace(self._slot_options(config), explicit=True, paged=False))

    def _explicit_runner(self, session: Any, model: Path, config: RunnerConfig) -> Runner:
        warn_of_explicit_kv(session.get_modelmeta().custom_metadata_map)
        device = Device(name="cpu", index=0)
        return ExplicitRunner(OrtExplicitSession(session, device, str(model)), config, str(model))

    def memory_bandwidth(self, options: Mapping[str, Any]) -> float:
        """Return the measured bandwidth of the memory in bytes/s."""
        return machine.memory_bandwidth() * 1e9

    def session_entries(self, options: Mapping[str, Any]) -> dict[str, str]:
        """Return the session entries for threads, and for int8 accuracy of portable int4 graphs."""
        return {
            "session.intra_op.allow_spinning": str(int(options["spinning"])),
            # With two graphs, spinning threads of one would occupy the cores of the other.
            "session.force_spinning_stop": str(int(options["wide_products"] == "on")),
            "session.qdq_matmulnbits_accuracy_level": str(self.kernels.accuracy_level),
        }

    def extend(self, settings: Any, options: Mapping[str, Any]) -> None:
        """Register carryall's kernels, if they are there and not excluded."""
        if options["kernels"] == "onnxruntime" or (options["kernels"] == "auto" and find_library() is None):
            return
        try:
            settings.register_custom_ops_library(str(tuned_kernels().path))
        except ort.runtime_errors() as error:
            raise ProviderUnavailableError(
                f"the CPU kernels cannot be used: {ort.one_line(error)}"
            ) from error

    def autotune(self) -> Tuning:
        """Measure the fastest instruction set of carryall's kernels and number of threads, and keep them.

        Raises:
            ProviderUnavailableError: the kernels are not built.
            UsageError: ``CARRYALL_KERNELS_ISA`` forces an instruction set, or the cache cannot be used.
        """
        from ..host.autotune import tune

        return tune(lambda path, threads: self.session(path, RunnerConfig(num_threads=threads)))

    def num_threads(self) -> int:
        """Return the threads that ``carryall doctor --autotune`` found, or one for each usable core."""
        tuned = stored_tuning()
        return machine.usable_cores() if tuned is None else tuned.threads

    def kernels_for(self, options: Mapping[str, Any]) -> Kernels:
        """Return the abilities of onnxruntime's kernels, and of carryall's if they are chosen."""
        from ..native.packing import tile_packer  # with the library of graphs, which loading may not need

        own = options["kernels"] == CARRYALL or is_paged(options)
        library = find_library() if own else None
        packer = None if library is None else tile_packer(library)
        return dataclasses.replace(
            self.kernels, quantized_linear=own, paged_attention=own, stored_tiles=packer
        )


def _has_fast_kernels() -> bool:
    """Whether carryall's kernels are there for this CPU, and proven to be faster than onnxruntime's."""
    return find_library() is not None and tuned_kernels().isa not in (PORTABLE, *UNPROVEN)


def _wide_products_pay(facts: Callable[[], Mapping[str, Any]]) -> bool:
    """Whether a second graph pays beside onnxruntime's kernels."""
    here, size = machine.describe_machine(), facts()["wide_bytes"]
    fits = 2 * size <= here.memory_available * _SHARE
    wide = size > 0 and fits and bool(machine.VNNI & set(here.features))
    if wide:
        message = "wide_products is on: prompts are computed in int8, which takes %d MB more memory"
        _log.info(message, size // 10**6)
    return wide


PROVIDER = CpuProvider
