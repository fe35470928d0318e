"""The provider ``cpu``: ONNX Runtime with its own kernels and those of ``providers/native``, KV in blocks."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...contract import SEQLENS_K
from ...errors import CarryallWarning, ProviderUnavailableError, UsageError
from ...graph_opt.lower.kernels import CPU, Kernels
from ...options import Checked
from ...records import dataclass
from ..base import Runner, RunnerConfig
from ..host import machine
from ..host.tuning import Tuning, stored_tuning, tuned_kernels
from ..native.library import BUILD, PORTABLE, find_library, splits_floats
from ..ort import ort
from ..ort.provider import OrtProvider, is_paged

if TYPE_CHECKING:
    import onnx_ir as ir

    from ...graph_opt.lower.pipelines.towers import TowerForm

CARRYALL = "carryall"  # the value of ``kernels``
_PAGED, _EXPLICIT = "paged", "explicit"  # values of ``kv_memory``
_SPIN_MICROSECONDS = 50  # the time that the system takes to wake a thread
_SLOW = (
    "carryall's CPU kernels are not built, so prompts take 6 to 9 times as long, and answers 2 to 3 times; "
    f"{BUILD}, or choose onnxruntime's: --provider-option kernels=onnxruntime"
)


@dataclass(frozen=True, kw_only=True)
class CpuOptions(Checked):
    """Options of the provider.

    Args:
        spinning: threads spin while they wait for work, which shortens steps and keeps idle cores busy
            briefly.
        kv_cache: ``int8``, ``bfloat16`` (half the memory of float32) or ``float32``, with
            ``kv_memory=paged``; ``auto`` is int8 if the model has scales for it or weights of 4 bits,
            bfloat16 if they have 8, else float32.
        kernels: ``carryall`` computes products with int4 and int8 weights, and attention, by carryall's own
            kernels, which must be built (``carryall doctor --build-kernels``); ``onnxruntime`` by its own.
            ``auto`` is ``carryall`` if they are there.
        kv_memory: ``paged``: KV in blocks that sequences allocate as they grow, and share if their first
            tokens are equal; all rows of a step are one run. It needs carryall's kernels. ``explicit``:
            sequences run one by one, and each run returns longer caches. ``auto`` is ``paged`` with
            carryall's kernels, except for attention that they do not have, such as heads of more than 640.
        latent_kv: ``compressed`` keeps the compressed keys and values of latent attention (DeepSeek, GLM 4.7
            Flash, MiniCPM 3, Youtu) in place of those of all heads, with ``kv_memory=paged``: far less
            memory; prompts take longer.
        state_cache: ``bfloat16`` halves the memory of the recurrent states of linear attention and Mamba-2,
            with ``kv_memory=paged``: they are rounded after every second token of a text, so results are
            less exact, and still the same bits however a text is computed.
        tower: ``int8`` computes products of ``vision.onnx`` and ``audio.onnx`` with weights and activations
            of 8 bits, and attention of ``vision.onnx`` with keys and values of 8 bits, by carryall's kernels:
            a picture takes less time, and is seen less exactly. ``bfloat16`` computes them by those kernels
            with weights of 16 bits where these hold their values (half the memory), and keys and values of
            bfloat16; where AMX multiplies them, it rounds activations, queries and weights of the softmax to
            bfloat16 too. ``auto`` with carryall's kernels is int8 if the decoder's weights are quantized;
            else bfloat16 on AMX, if it holds the weights of all large products; else float32.
        wide_products: without effect; there is one graph for prompts and decoding.
    """

    spinning: bool = True
    kv_cache: Literal["auto", "int8", "bfloat16", "float32"] = "auto"
    kernels: Literal["auto", "carryall", "onnxruntime"] = "auto"
    kv_memory: Literal["auto", "paged", "explicit"] = "auto"
    latent_kv: Literal["expanded", "compressed"] = "expanded"
    state_cache: Literal["float32", "bfloat16"] = "float32"
    tower: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    wide_products: Literal["auto", "off"] = "auto"


class CpuProvider(OrtProvider):
    """Any processor with ONNX Runtime kernels (x86-64, arm64)."""

    name = "cpu"
    execution_provider = ort.CPU
    takes_ranks = True
    kernels = CPU
    options: ClassVar[type[Any]] = CpuOptions

    def resolve_options(self, config: RunnerConfig) -> RunnerConfig:
        """Decide ``kernels=auto`` by the library; ``kv_memory=auto`` follows the kernels.

        Raises:
            ProviderUnavailableError: carryall's kernels are asked for or installed, but cannot be used.
        """
        options = self.checked_options(config.options)
        kernels, memory = options["kernels"], options["kv_memory"]
        if kernels == "auto":
            kernels = CARRYALL if _has_fast_kernels() else "onnxruntime"
            if find_library() is None:
                warnings.warn(_SLOW, CarryallWarning, stacklevel=2)
        if kernels == CARRYALL:
            tuned_kernels()
        elif memory == _PAGED:
            raise UsageError(f"kv_memory=paged needs carryall's kernels; {BUILD}")
        if options["tower"] in ("bfloat16", "int8") and kernels != CARRYALL:
            raise UsageError(f"tower={options['tower']} needs carryall's kernels; {BUILD}")
        if memory == "auto":
            memory = _PAGED if kernels == CARRYALL else _EXPLICIT
        if options["latent_kv"] == "compressed" and not (kernels == CARRYALL and memory == _PAGED):
            raise UsageError(f"latent_kv=compressed needs carryall's kernels and kv_memory=paged; {BUILD}")
        return dataclasses.replace(
            config, options={**config.options, "kernels": kernels, "kv_memory": memory}
        )

    def passes(self, config: RunnerConfig) -> list[ir.passes.PassBase]:
        """Return the passes for the chosen memory, in order; unless it is chosen, those for slots.

        Only ``carryall optimize`` chooses none: it writes a graph of onnxruntime's operators.
        """
        explicit = self.explicit_passes(config) if config.options.get("kv_memory") == _EXPLICIT else None
        return super().passes(config) if explicit is None else explicit

    def holds_angles(self, config: RunnerConfig) -> bool:
        """Return whether the kernels of attention are onnxruntime's; carryall's take the angles of a step."""
        return config.options.get("kernels") != CARRYALL or config.options.get("kv_memory") != _PAGED

    def takes_images(self, config: RunnerConfig) -> bool:
        return True

    def takes_stored(self, config: RunnerConfig) -> bool:
        """Return whether carryall's kernels compute with the blocks of GGUF files."""
        options = self._slot_options(config)
        return options.paged and options.fused_experts and options.kernels.stored_tiles is not None

    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        """Load a graph lowered by ``passes``."""
        from ..ort.device_memory import Device  # 0.1 s that other sessions do not need
        from ..ort.host_paged import host_paged_runner, is_host_paged
        from ..ort.slot_runner import SlotRunner

        session = self._open(model, config, generating=True)
        if is_host_paged(session):
            return host_paged_runner(session, config, str(model))
        if SEQLENS_K in {value.name for value in session.get_inputs()}:
            return SlotRunner(session, config, str(model))
        own = config.options.get("kernels") == CARRYALL
        reason = "kv_memory is explicit" if own else "carryall's CPU kernels are not in use"
        return self._explicit_runner(session, model, config, Device(name="cpu", index=0), reason)

    def text_passes(self) -> list[ir.passes.PassBase]:
        """Return the passes for carryall's kernels."""
        from ...graph_opt.lower.pipelines.texts import text_passes

        return text_passes(self.kernels_for(self.checked_options({"kernels": CARRYALL})))

    def lowers_texts(self) -> bool:
        """Return whether carryall's kernels are there and faster."""
        return _has_fast_kernels()

    def kernel_form(self) -> str:
        """Return whether the kernels multiply split weights."""
        return "split" if find_library() is not None and splits_floats() else ""

    def tower_passes(
        self, config: RunnerConfig, tower: ir.Model, *, quantized: bool = False
    ) -> list[ir.passes.PassBase]:
        """Return the passes for onnxruntime's kernels in float32, or for carryall's in 16 or 8 bits."""
        from ...graph_opt.lower.pipelines.towers import tower_passes
        from ...graph_opt.lower.products.half_products import bfloat16_holds

        options = self.checked_options(config.options)
        form = _tower(options, quantized=quantized)
        if form == "auto":
            form = "bfloat16" if bfloat16_holds(tower.graph) else "float32"
        return tower_passes(self.kernels_for(options), form)

    def tower_form(self, config: RunnerConfig, *, quantized: bool = False) -> str | None:
        """Return the option, decided if it is ``auto`` and not by the weights, and ``kernel_form``."""
        form = _tower(self.checked_options(config.options), quantized=quantized)
        return form if form == "float32" else f"{form} {self.kernel_form()}".rstrip()

    def memory_bandwidth(self, options: Mapping[str, Any]) -> float:
        """Return the measured bandwidth of the memory in bytes/s."""
        return machine.memory_bandwidth() * 1e9

    def session_entries(self, options: Mapping[str, Any]) -> dict[str, str]:
        """Return the session entries for threads, and for int8 accuracy of portable int4 graphs."""
        entries = {
            "session.intra_op.allow_spinning": str(int(options["spinning"])),
            "session.qdq_matmulnbits_accuracy_level": str(self.kernels.accuracy_level),
        }
        if options["kernels"] == CARRYALL:  # a run has few parallel sections, with Python between runs
            entries["session.intra_op.spin_duration_us"] = str(_SPIN_MICROSECONDS)
        return entries

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

        native = options["kernels"] == CARRYALL or is_paged(options)
        library = find_library() if native else None
        packer = None if library is None else tile_packer(library)
        return dataclasses.replace(
            self.kernels,
            quantized_linear=native,
            silu_and_mul=native,
            paged_attention=native,
            stored_tiles=packer,
            split_floats=library is not None and splits_floats(),
        )


def _tower(options: Mapping[str, Any], *, quantized: bool) -> TowerForm | Literal["auto"]:
    """Return the option ``tower``, decided if it is ``auto``, unless the tower's weights decide."""
    if options["tower"] != "auto":
        form: TowerForm = options["tower"]
        return form
    if options["kernels"] != CARRYALL:
        return "float32"
    return "int8" if quantized else "auto" if splits_floats() else "float32"


def _has_fast_kernels() -> bool:
    """Whether carryall's kernels are there, with instructions of this CPU."""
    return find_library() is not None and tuned_kernels().isa != PORTABLE


PROVIDER = CpuProvider
