"""NVIDIA GPUs through ONNX Runtime's own kernels: KV and step inputs on the device, captured decode runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from ...errors import ProviderRuntimeError
from ...graph_opt.lower.kernels import CUDA
from ...graph_opt.lower.pipelines.ort_paged import block_size
from ...options import Checked, option
from ..base import Runner, RunnerConfig, RunnerInfo
from ..host import libraries, nvidia
from ..host.nvidia_provider import NvidiaProvider
from ..kv.block_pool import BlockPool
from ..kv.kv_memory import KVSpec
from ..ort import ort
from ..ort.device_memory import Device, DeviceMemory
from ..ort.paged import OrtPagedSession, read_paged_graph
from ..ort.provider import is_paged
from ..ort.slot_policy import SlotPolicy, powers_of_two
from ..ort.slot_runner import SlotRunner
from ..runners.paged_runner import PagedRunner

# Flash attention holds no matrix of scores, and a GPU wants long pieces.
_PREFILL_CHUNK = 2048


@dataclass(frozen=True, kw_only=True)
class CudaOptions(Checked):
    """Options of the provider.

    Args:
        device: which of several; CUDA_VISIBLE_DEVICES counts.
        compute: ``fp16`` or ``bf16`` (compute capability 8), what float graphs are converted to. Models whose
            activations go beyond 65504, such as Gemma's, need bf16.
        kv_cache: ``int8`` or ``float32``, which is that of ``compute`` here; ``auto`` is int8 where the model
            has scales for it.
        cuda_graphs: capture decode runs, one a batch size in powers of two, and replay them.
        top_logits: how many of the best logits the device finds, so that only these are downloaded for
            requests that need no more; 0 downloads all.
        kv_memory: ``slots``, a buffer as long as the context for each sequence; or ``paged``, blocks that
            sequences take as they grow and share where their beginnings are equal. Paged runs are not
            captured, their logits all cross the bus, and their cache is float.
        memory_fraction: how much of the memory that is free once the model is loaded KV may take.
    """

    device: int = option(0, least=0)
    compute: Literal["fp16", "bf16", "fp32"] = "fp16"
    kv_cache: Literal["auto", "int8", "float32"] = "auto"
    cuda_graphs: bool = True
    top_logits: int = option(64, least=0)
    kv_memory: Literal["slots", "paged"] = "slots"
    memory_fraction: float = option(0.9, least=0, most=1)


class CudaProvider(NvidiaProvider):
    """A CUDA device, compute capability 7.5 or newer."""

    name = "cuda"
    execution_provider = "CUDAExecutionProvider"
    kernels = CUDA
    device_name = "cuda"
    vendors = frozenset({"NVIDIA"})
    block_size = staticmethod(block_size)
    options: ClassVar[type[Any]] = CudaOptions

    def provider_options(self, options: Mapping[str, Any], *, generating: bool) -> dict[str, str]:
        """Options of the execution provider itself."""
        cudnn = libraries.load(nvidia.cudnn().file) is not None
        return {
            "device_id": str(options["device"]),
            "arena_extend_strategy": "kSameAsRequested",
            # Sums of squares in fp32, whatever the type of the activations.
            "enable_skip_layer_norm_strict_mode": "1",
            "enable_cuda_graph": str(int(generating and options["cuda_graphs"])),
            # Generating needs no convolution; without cuDNN the provider then starts all the same.
            **({"enable_cudnn": "0"} if generating and not cudnn else {}),
        }

    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        """Load a graph lowered by ``passes`` for generation, with fewer slots if memory is short."""
        options = self.checked_options(config.options)
        device = Device(name=self.device_name, index=options["device"])
        if is_paged(options):
            return self._paged_runner(model, config, device)
        session = self._open(model, config, generating=True)

        def memory(specs: Mapping[str, KVSpec], slots: int, length: int) -> DeviceMemory:
            free = int(self.free_memory(device.index) * options["memory_fraction"])
            slots = slots_that_fit(free, sum(spec.bytes_per_token for spec in specs.values()) * length, slots)
            return DeviceMemory(specs, slots, length, device=device, session_factory=self._copier(config))

        return SlotRunner(
            session, config, str(model), memory=memory, policy=decode_policy(config.max_slots, options)
        )

    def _paged_runner(self, model: Path, config: RunnerConfig, device: Device) -> Runner:
        options = {
            **self.checked_options(config.options),
            "cuda_graphs": False,
        }  # shapes change with every step
        own = self.provider_options(options, generating=True)
        session = self._open(model, config, generating=True, own=own)
        graph = read_paged_graph(session, str(model), self.block_size)
        length = config.context_length or graph.context_length
        wanted = config.max_slots * -(-length // graph.block_size)
        free = int(self.free_memory(device.index) * options["memory_fraction"])
        blocks = slots_that_fit(free, graph.block_bytes, wanted)
        memory = DeviceMemory(
            graph.caches, blocks, graph.kv_heads, device=device, session_factory=self._copier(config)
        )
        info = RunnerInfo(
            graph.vocab_size,
            length,
            config.max_slots,
            graph.block_bytes // graph.block_size,
            batched_multi_token=True,
        )
        pool = BlockPool(blocks, graph.block_size, config.max_slots)
        paged = OrtPagedSession(session, memory)
        return PagedRunner(paged, pool, info, hidden_size=graph.hidden_size)

    def free_memory(self, index: int) -> int:
        """Bytes that a device has to spare now."""
        return nvidia.memory(index)[0]

    def _copier(self, config: RunnerConfig) -> Any:
        """Open small graphs on the same device, never captured."""
        own = self.provider_options(self.checked_options(config.options), generating=False)
        return lambda content: ort.open_session(content, self.execution_provider, None, own)


def decode_policy(slots: int, options: Mapping[str, Any]) -> SlotPolicy:
    """Runs in powers of two: a row more costs next to nothing beside the weights that every run reads."""
    return SlotPolicy(
        prefill_chunk=_PREFILL_CHUNK,
        max_scores=2**40,
        buckets=powers_of_two(slots),
        capture=options["cuda_graphs"],
    )


def slots_that_fit(free: int, slot_bytes: int, wanted: int) -> int:
    """How many slots the free bytes hold, at most ``wanted``.

    Raises:
        ProviderRuntimeError: not even one.
    """
    slots = min(wanted, free // slot_bytes)
    if slots < 1:
        raise ProviderRuntimeError(
            f"{free / 2**30:.2f} GiB of device memory hold no sequence: its KV takes "
            f"{slot_bytes / 2**30:.2f} GiB. Lower the context length, quantize the model or its KV cache, "
            "or raise memory_fraction."
        )
    return slots


PROVIDER = CudaProvider
