"""The provider ``cuda``: ONNX Runtime's CUDA kernels, KV on the device, captured decode runs."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import onnx_ir as ir

from ...contract import DRAW, SEQLENS_K, SLOT_KV
from ...errors import (
    CarryallError,
    GraphError,
    ProviderError,
    ProviderRuntimeError,
    ProviderUnavailableError,
)
from ...graph_opt.graph.edit import constant, nodes_of
from ...graph_opt.graph.graph_facts import initializers
from ...graph_opt.graph.load import read_model
from ...graph_opt.lower.kernels import CUDA, Kernels
from ...graph_opt.lower.paged_kv import TABLE, block_size
from ...options import Checked, option
from ...records import dataclass
from ...reports import human_bytes
from ...storage.cache import cache_key
from ...storage.remembered import remembered
from ..base import Runner, RunnerConfig
from ..cuda.kernels import MOST_CANDIDATES, load_kernels, operators_library
from ..cuda.nccl import load_nccl
from ..cuda.paged_agreement import PagedAgreement
from ..cuda.paged_self_test import paged_self_test
from ..cuda.self_test import self_test
from ..host import libraries, nvidia
from ..host.nvidia_provider import NvidiaProvider
from ..kv.block_pool import BlockTables
from ..kv.decoder_graph import DecoderGraph, chosen_context_length, read_slot_graph
from ..kv.kv_memory import KVSpec
from ..kv_groups import FullKV
from ..lora import LoraPlaces
from ..ort import ort
from ..ort.device_block import DeviceStream
from ..ort.device_memory import Device, DeviceSlots, slots_that_fit
from ..ort.paged import OrtPagedSession, read_paged_graph, result_bytes
from ..ort.paged_forms import Forms
from ..ort.provider import is_paged
from ..ort.slot_policy import SlotPolicy, powers_of_two
from ..ort.slot_runner import SlotRunner
from ..runners.paged_runner import PagedRunner
from ..runners.ranks_memory import VARIABLE as RANKS
from ..runners.self_agreement import joint_prompts_agree, padded_runs_agree
from ..runners.thread_runner import ThreadRunner

_log = logging.getLogger(__name__)

_REMEDY = "or raise memory_fraction"
# Compute capabilities for which releases of onnxruntime-gpu have code: fatbins of
# libonnxruntime_providers_cuda.so. They hold no PTX, which a driver could translate for other devices. Code
# runs on devices of the same major version and no smaller minor version (CUDA programming guide, "Binary
# Compatibility").
_CODE = {"1.31": ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0))}
_AMPERE = (8, 0)
CARRYALL = "carryall"  # the value of ``kernels``
_AUTO, _PAGED, _SLOTS = "auto", "paged", "slots"  # values of ``kv_memory``
_COMPUTES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float"}  # values of ``compute`` in ONNX's text
# onnxruntime 1.31: contrib_ops/cuda/bert/group_query_attention.cc refuses an int8 cache below, and the
# grouped products of moe/ have no kernels.
_NEEDS = {("compute", "bf16"): _AMPERE, ("kv_cache", "int8"): _AMPERE, ("fused_experts", "on"): _AMPERE}
_NEEDS[("kv_cache", "fp8")] = (8, 9)  # whose products read the type
# Flash attention stores no score matrix. A host starts the kernels of a run in the time in which an H200
# computes 1,000 tokens of a 0.6 B model.
_PREFILL_CHUNK = 2048
_STEP_TOKENS = 8192  # of a step with paged KV: activations of a 0.6 B model take 0.3 GB
_MOST_FORMS = 256
_GRAPH_BYTES = 16 << 20  # of a captured run, by the experience of other engines; not measured here
_MAX_PADDING = 64  # tokens; on slower devices they cost more than another run


@dataclass(frozen=True, kw_only=True)
class CudaOptions(Checked):
    """Options of the provider.

    Args:
        device: index of the device, within CUDA_VISIBLE_DEVICES.
        compute: the dtype to which float graphs are converted: ``fp16``, ``bf16`` (compute capability 8) or
            ``fp32``. Models with activations above 65504, such as Gemma, need bf16.
        kv_cache: ``int8`` (compute capability 8), ``fp8`` (e4m3, compute capability 8.9), or ``float32`` for
            the dtype of ``compute``; ``auto`` is int8 if the model has scales and the device the capability.
        fused_experts: compute a mixture of experts in one operator (compute capability 8); ``auto`` does if
            the device has the capability.
        joint_prompts: compute new prompts of similar lengths together, with ``slots``; they are computed one
            by one if the device computes other logits then, which is tried at load.
        kernels: ``carryall`` computes gates, and the largest logits with the tokens drawn from them, by
            carryall's own kernels, which NVRTC compiles when they are used first; ``onnxruntime`` by its
            own, in many more launches. ``auto`` is ``carryall`` if they can be compiled and agree with
            onnxruntime's on the device, which is tried at load.
        cuda_graphs: capture runs of some sizes, and replay them; with ``slots`` only decode runs, one for
            each power of two of the batch size. Runs with sizes that depend on results, as of mixtures that
            are not fused, cannot be captured.
        top_logits: number of largest logits selected on the device; only these are downloaded for requests
            that need no more. 0 downloads all.
        steps_ahead: with ``paged`` and ``top_logits``, 1 lets the device draw tokens and begin the next step
            with them while the host samples; the host's tokens count.
        kv_memory: ``paged``: blocks that sequences allocate as they grow, and share if their first tokens are
            equal. Prompts and single tokens share a run, and runs of up to 2,048 tokens are captured in some
            sizes. ``slots``: a buffer of context length for each sequence. ``auto`` is ``paged`` if its
            operator agrees with that of slots on the device, which is tried once, and computes the model.
        memory_fraction: maximum share of the memory, free after loading the model, for the KV cache.
    """

    device: int = option(0, least=0)
    compute: Literal["fp16", "bf16", "fp32"] = "fp16"
    kv_cache: Literal["auto", "int8", "fp8", "float32"] = "auto"
    fused_experts: Literal["auto", "on", "off"] = "auto"
    joint_prompts: bool = True
    kernels: Literal["auto", "carryall", "onnxruntime"] = "auto"
    cuda_graphs: bool = True
    top_logits: int = option(64, least=0)
    steps_ahead: int = option(1, least=0, most=1)
    kv_memory: Literal["auto", "paged", "slots"] = "auto"
    memory_fraction: float = option(0.9, least=0, most=1)


@dataclass(frozen=True, slots=True)
class _PagedSizes:
    """Sizes of a runner with KV in blocks.

    Args:
        block: tokens of a block.
        token_bytes: bytes of KV of a token.
        blocks: number of blocks, without the one for padding.
        slots: number of sequences.
        rows: the most rows of a run, padding included.
        forms: sizes of runs to capture; None captures none.
        most_forms: maximum number of captured runs.
    """

    block: int
    token_bytes: int
    blocks: int
    slots: int
    rows: int
    forms: Forms | None
    most_forms: int


class CudaProvider(NvidiaProvider):
    """A CUDA device, compute capability 7.5 or newer."""

    name = "cuda"
    execution_provider = "CUDAExecutionProvider"
    kernels = CUDA
    device_name = "cuda"
    vendors = frozenset({"NVIDIA"})
    takes_ranks = True
    block_size = staticmethod(block_size)
    options: ClassVar[type[Any]] = CudaOptions
    _complaints: ClassVar[dict[tuple[type, int], str | None]] = {}  # about carryall's kernels, by device
    _paged_complaints: ClassVar[dict[tuple[Any, ...], str | None]] = {}  # by device and types

    def complaint(self, index: int) -> str | None:
        """Return why the wheel has no code for a device, None if it has, or if its code is not known."""
        version = ort.installed_wheels().get("onnxruntime-gpu", "")
        code = _CODE.get(".".join(version.split(".")[:2]))
        major, minor = self.compute_capability(index)
        if code is None or any(one == major and other <= minor for one, other in code):
            return None
        listed = ", ".join(f"{one}.{other}" for one, other in code)
        return (
            f"device {index} has compute capability {major}.{minor}, for which onnxruntime-gpu {version} has "
            f"neither code nor PTX; it has code for {listed}. Use another device, or another version"
        )

    def resolve_options(self, config: RunnerConfig) -> RunnerConfig:
        """Decide ``auto`` of ``kv_cache`` and ``fused_experts`` by the device's compute capability.

        ``kernels=auto`` is decided by a self-test of the kernels on the device, and so is ``kv_memory=auto``:
        it stays where blocks are possible, if the model is one for them.

        Raises:
            ProviderUnavailableError: the device lacks the capability for an option, or carryall's kernels
                are asked for and cannot be used.
        """
        options = self.checked_options(config.options)
        if self.available() is not None:
            return config  # opening a session says why
        capability = self.compute_capability(options["device"])
        for (name, value), needed in _NEEDS.items():
            if options[name] == value and capability < needed:
                raise ProviderUnavailableError(
                    f"{name}={value} needs compute capability {needed[0]}.{needed[1]}, but device "
                    f"{options['device']} has {capability[0]}.{capability[1]}"
                )
        resolved = {**config.options, "kernels": self._chosen_kernels(options)}
        if capability < _AMPERE:
            resolved |= {"kv_cache": "float32", "fused_experts": "off"}
        complaint = self.paged_complaint(options | resolved) if options["kv_memory"] == _AUTO else None
        if complaint is not None:
            _log.warning(
                "KV is in slots, not in blocks, on %s:%d: %s", self.name, options["device"], complaint
            )
            resolved["kv_memory"] = _SLOTS
        return dataclasses.replace(config, options=resolved)

    def lowerings(self, config: RunnerConfig) -> list[RunnerConfig]:
        """Return the options with blocks, then those with slots, if both are allowed."""
        if self.checked_options(config.options)["kv_memory"] != _AUTO:
            return [config]
        return [
            dataclasses.replace(config, options={**config.options, "kv_memory": memory})
            for memory in (_PAGED, _SLOTS)
        ]

    def rank_config(self, config: RunnerConfig, rank: int) -> RunnerConfig:
        """Give each rank a device, from ``device`` on.

        Nothing is captured, which NCCL's threads could spoil: no machine with two devices has shown that they
        do not. Ranks return parts of the logits, so that none can choose the largest.
        """
        device = self.checked_options(config.options)["device"] + rank
        own = {"device": device, "cuda_graphs": False, "top_logits": 0}
        return dataclasses.replace(config, options={**config.options, **own})

    def takes_images(self, config: RunnerConfig) -> bool:
        """Return whether KV may be in blocks; slots have no inputs for pictures."""
        return any(is_paged(self.checked_options(way.options)) for way in self.lowerings(config))

    def kernels_complaint(self, index: int) -> str | None:
        """Return why carryall's kernels cannot be used on a device, None if they can."""
        key = type(self), index
        if key not in self._complaints:
            self.enter(index)
            try:
                opened = partial(self._small_session, index)
                self._complaints[key] = self_test(opened) or paged_self_test(opened, self.device(index))
            except CarryallError as error:
                self._complaints[key] = str(error)
        return self._complaints[key]

    def paged_complaint(self, options: Mapping[str, Any]) -> str | None:
        """Return why KV in blocks cannot be used on a device, None if it can.

        Whether the operators agree is stored in the cache, by kind of device and version of the wheel.

        Args:
            options: all options, of which the device and the types of activations and caches count.
        """
        if options["compute"] == "fp32" and not self.kernels.float_attention:
            return None  # neither operator has it, as ``passes`` says
        index, check = options["device"], self._paged_agreement(options)
        key = type(self), index, check.compute, *check.quantized
        if key not in self._paged_complaints:
            self.enter(index)
            opened = partial(self._small_session, index, kernels="onnxruntime")
            facts = {"device": self.device_facts(index), "check": check.identity}
            failures: tuple[type[BaseException], ...] = (ProviderError, GraphError, *ort.runtime_errors())
            try:
                self._paged_complaints[key] = remembered(
                    cache_key(**facts), lambda: {"complaint": check.complaint(opened, self.device(index))}
                )["complaint"]
            except failures as error:  # not stored
                self._paged_complaints[key] = ort.one_line(error)
        return self._paged_complaints[key]

    def device_facts(self, index: int) -> Mapping[str, int]:
        """Return what kind of device it is, and the version of its driver."""
        return nvidia.device_facts(index)

    def _paged_agreement(self, options: Mapping[str, Any]) -> PagedAgreement:
        """Return the check of the types that a model may have with these options."""
        caches = {"auto": ("int8",), "int8": ("int8",), "fp8": ("float8e4m3fn",)}
        return PagedAgreement(
            _COMPUTES[options["compute"]], caches.get(options["kv_cache"], ()), self.block_size
        )

    def load_kernels(self, index: int) -> None:
        """Load carryall's kernels for a device."""
        load_kernels(index, self.compute_capability(index))

    def _chosen_kernels(self, options: Mapping[str, Any]) -> str:
        chosen: str = options["kernels"]
        complaint = None if chosen == "onnxruntime" else self.kernels_complaint(options["device"])
        if complaint is None:
            return "onnxruntime" if chosen == "onnxruntime" else CARRYALL
        if chosen == CARRYALL:
            raise ProviderUnavailableError(f"kernels=carryall cannot be used: {complaint}")
        _log.warning("onnxruntime's kernels are used in place of carryall's: %s", complaint)
        return "onnxruntime"

    def _small_session(self, index: int, content: bytes, kernels: str = CARRYALL) -> Any:
        options = self.checked_options({"device": index, "kernels": kernels})
        settings = ort.session_options()
        self.extend(settings, options)
        provider = self.provider_options(options, generating=False)
        return ort.open_session(content, self.execution_provider, settings, provider)

    def kernels_for(self, options: Mapping[str, Any]) -> Kernels:
        """Return the abilities of onnxruntime's kernels, and of carryall's if they are chosen."""
        if options["kernels"] != CARRYALL:
            return self.kernels
        return dataclasses.replace(
            self.kernels, silu_and_mul=True, int4_product=True, paged_decode=True, draw_tokens=MOST_CANDIDATES
        )

    def extend(self, settings: Any, options: Mapping[str, Any]) -> None:
        """Register carryall's operators, if they are chosen.

        Raises:
            ProviderUnavailableError: they are not built, or onnxruntime cannot load them.
        """
        if options["kernels"] != CARRYALL:
            return
        self.load_kernels(options["device"])
        if RANKS in os.environ:
            load_nccl(self.operators_library())
        try:
            settings.register_custom_ops_library(str(self.operators_library()))
        except ort.runtime_errors() as error:
            raise ProviderUnavailableError(
                f"carryall's operators cannot be used: {ort.one_line(error)}"
            ) from error

    def operators_library(self) -> Path:
        """Return the library of carryall's operators."""
        return operators_library()

    def provider_options(self, options: Mapping[str, Any], *, generating: bool) -> dict[str, str]:
        """Return the options of the execution provider."""
        cudnn = libraries.load(nvidia.cudnn().file) is not None
        return {
            "device_id": str(options["device"]),
            "arena_extend_strategy": "kSameAsRequested",
            # Accumulate sums of squares in fp32 for every activation dtype.
            "enable_skip_layer_norm_strict_mode": "1",
            "enable_cuda_graph": str(int(generating and options["cuda_graphs"])),
            # Decoders need no convolution, so the provider starts without cuDNN.
            **({"enable_cudnn": "0"} if generating and not cudnn else {}),
        }

    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        """Load a graph lowered by ``passes`` for generation, with fewer slots if memory is short."""
        return ThreadRunner(lambda: self._runner(model, config))

    def _runner(self, model: Path, config: RunnerConfig) -> Runner:
        options = self._capturing(model, config)
        device = self.device(options["device"])
        lowered = read_model(model)
        inputs = {value.name for value in lowered.graph.inputs}
        self._check_weights(model, lowered, options)
        if (reason := lowered.metadata_props.get(SLOT_KV)) is not None:
            _log.warning("%s: KV is in slots, not in blocks: %s", model, reason)
        if not inputs & {SEQLENS_K, TABLE}:
            settings = self.provider_options(options | {"cuda_graphs": False}, generating=True)
            session = self._open(model, config, generating=True, provider_settings=settings)
            return self._explicit_runner(session, model, config, device, "the graph has explicit KV")
        if TABLE in inputs:
            return self._paged_runner(model, config, options, device)
        settings = self.provider_options(options, generating=True)
        session = self._open(model, config, generating=True, provider_settings=settings)

        def memory(specs: Mapping[str, KVSpec], slots: int, length: int) -> DeviceSlots:
            free = int(self.free_memory(options) * options["memory_fraction"])
            slot_bytes = sum(spec.bytes_per_token for spec in specs.values()) * length
            slots = slots_that_fit(free, slot_bytes, slots, _REMEDY)
            return DeviceSlots(specs, slots, length, device=device, session_factory=self._copier(config))

        runner = SlotRunner(
            session, config, str(model), memory=memory, policy=decode_policy(config.max_slots, options)
        )
        takes_tokens = read_slot_graph(session, str(model)).hidden_size is None
        if options["joint_prompts"] and takes_tokens and not joint_prompts_agree(runner):
            _log.warning("%s: prompts run one by one, because together they have other logits here", model)
            runner.run_prompts_alone()
        return runner

    def _check_weights(self, model: Path, lowered: ir.Model, options: Mapping[str, Any]) -> None:
        """Check that the weights fit beside what the device holds, other models among it.

        Raises:
            ProviderRuntimeError: they do not.
        """
        if self.available() is not None:
            return  # opening the session says why
        memory, needed = self.device_memory(options), sum(one.nbytes for one in initializers(lowered))
        if needed > memory.total - memory.used:
            raise ProviderRuntimeError(
                f"not enough memory to load {model}: its weights take {human_bytes(needed)}, and "
                f"{memory.device} has {human_bytes(memory.total - memory.used)} left of "
                f"{human_bytes(memory.total)}. Close other models, quantize this one, or put layers on the "
                "CPU (--split cuda,cpu)"
            )

    def _paged_runner(
        self, model: Path, config: RunnerConfig, options: dict[str, Any], device: Device
    ) -> Runner:
        stream = self.stream(options["device"])
        settings = self.provider_options(options, generating=True) | _on(stream)
        session = self._open(model, config, generating=True, provider_settings=settings)
        graph = read_paged_graph(session, str(model))
        length = chosen_context_length(config.context_length, graph.context_length, str(model))
        loras = LoraPlaces(graph.lora_modules, config.max_loras, config.max_lora_rank, sliced=False)
        held = sum(array.nbytes for array in loras.arrays.values())
        sizes = self._paged_sizes(graph, length, config.max_slots, options, held)
        caches = {name: dataclasses.replace(spec, heads=sizes.block) for name, spec in graph.caches.items()}
        copier, heads = self._copier(config, stream), next(iter(graph.caches.values())).heads
        # The last block takes the padding of captured runs.
        memory = DeviceSlots(caches, sizes.blocks + 1, heads, device=device, session_factory=copier)
        paged = OrtPagedSession(
            session,
            graph,
            memory,
            stream,
            sizes.forms,
            block_size=sizes.block,
            rows=sizes.rows,
            most_forms=sizes.most_forms,
            adapters=loras.arrays,
        )
        info = graph.info(
            config,
            (FullKV(sizes.token_bytes),),
            kv_layout=paged.layout,
            length=length,
            slots=sizes.slots,
            batched_multi_token=True,
            on_device=True,
            step_tokens=_STEP_TOKENS,
            steps_ahead=int(DRAW in graph.inputs),
        )
        runner = PagedRunner(
            paged,
            BlockTables(sizes.blocks, sizes.block, sizes.slots),
            info,
            hidden_size=graph.hidden_size,
            loras=loras if graph.lora_modules else None,
            ahead=paged if info.steps_ahead else None,
        )
        if paged.pads and graph.hidden_size is None and not padded_runs_agree(runner, paged.pad):
            _log.warning("%s: runs are not captured, because padded ones have other logits here", model)
            paged.pad(pads=False)
        paged.capture_decoding()
        return runner

    def _paged_sizes(
        self, graph: DecoderGraph, length: int, slots: int, options: Mapping[str, Any], held: int
    ) -> _PagedSizes:
        """Return what fits into the free memory beside ``held`` bytes; a slot has a context, or two blocks.

        Raises:
            ProviderRuntimeError: not even two blocks fit.
        """
        specs = graph.caches.values()
        block = self.block_size(max(spec.width for spec in specs))
        token_bytes = sum(spec.bytes_per_token for spec in specs)
        each, captures = -(-length // block), options["cuda_graphs"]
        rows = max(slots, Forms(block, each, slots).most_rows if captures else 0)
        share = int(self.free_memory(options) * options["memory_fraction"])
        most_forms = min(_MOST_FORMS, share // 16 // _GRAPH_BYTES) if captures else 0
        rest = held + most_forms * _GRAPH_BYTES + result_bytes(graph, rows)  # what is not for KV
        if share - rest < 2 * block * token_bytes:
            raise ProviderRuntimeError(
                f"the device has no memory for KV: two blocks of {block} tokens take "
                f"{human_bytes(2 * block * token_bytes)}; memory_fraction allows {human_bytes(share)}, of "
                f"which captured runs, logits and adapters take {human_bytes(rest)}. Close other models, "
                f"lower max_slots, quantize the model or its KV cache, {_REMEDY}."
            )
        blocks = slots_that_fit(share - rest, block * token_bytes, slots * each + 1, _REMEDY) - 1
        # The last block of a slot may be partly empty, so with fewer blocks most of them would be kept free.
        slots = min(slots, max(blocks // each, -(-blocks // 2)))
        forms = Forms(block, each, slots) if captures else None
        return _PagedSizes(block, token_bytes, blocks, slots, rows, forms, most_forms)

    def _capturing(self, model: Path, config: RunnerConfig) -> dict[str, Any]:
        """Return all options, ``cuda_graphs`` off if runs of the model cannot be captured."""
        options = self.checked_options(config.options)
        obstacle = options["cuda_graphs"] and uncapturable(read_model(model).graph)
        if obstacle:
            _log.warning("decode runs of %s are not captured: %s", model, obstacle)
            options["cuda_graphs"] = False
        return options

    def compute_capability(self, index: int) -> tuple[int, int]:
        """Return the compute capability of a device."""
        return nvidia.compute_capability(index)

    def _copier(self, config: RunnerConfig, stream: DeviceStream | None = None) -> Any:
        """Return a function that opens small graphs on the same device, without capture."""
        settings = self.provider_options(self.checked_options(config.options), generating=False) | _on(stream)
        return lambda content: ort.open_session(content, self.execution_provider, None, settings)


def _on(stream: DeviceStream | None) -> dict[str, str]:
    """Return the provider options that let a session work on a stream; 0 is no handle."""
    if stream is None or not stream.handle:
        return {}
    return {"has_user_compute_stream": "1", "user_compute_stream": str(stream.handle)}


def uncapturable(graph: ir.Graph) -> str | None:
    """Return why runs of a lowered graph cannot be captured, None if they can.

    A captured run has fixed shapes, and nothing of it may wait for the host.
    """
    for node in nodes_of(graph, "Split"):
        if len(node.inputs) > 1 and node.inputs[1] is not None and constant(node.inputs[1]) is None:
            return f"the sizes of {node.op_type} {node.name} are computed"
    return None


def decode_policy(slots: int, options: Mapping[str, Any]) -> SlotPolicy:
    """Return a policy with decode runs in powers of two: reading the weights costs more than rows."""
    return SlotPolicy(
        prefill_chunk=_PREFILL_CHUNK,
        max_scores=2**40,
        buckets=powers_of_two(slots),
        capture=options["cuda_graphs"],
        joint_prompts=options["joint_prompts"],
        joint_tokens=_PREFILL_CHUNK,
        max_padding=_MAX_PADDING,
    )


PROVIDER = CudaProvider
