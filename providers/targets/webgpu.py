"""The provider ``webgpu``: AMD, Apple, Intel and NVIDIA GPUs through ONNX Runtime's WebGPU plugin.

It runs on Direct3D 12, Metal and Vulkan. KV stays on the device in banks of slots, because WebGPU's buffers
are handles of which no part can be bound.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir

from ...contract import SEQLENS_K
from ...errors import CarryallError, ProviderUnavailableError, UsageError
from ...graph_opt.lower.kernels import WEBGPU
from ...options import Checked, option
from ...records import dataclass
from ..base import Runner, RunnerConfig
from ..host.machine import memory_bandwidth
from ..kv.decoder_graph import read_graph, read_slot_graph
from ..kv.kv_memory import KVSpec
from ..ort import ort
from ..ort.banked_memory import BankedMemory
from ..ort.device_memory import Device, slots_that_fit
from ..ort.input_memory import cache_device, device_inputs
from ..ort.plugins import packaged_library, plugin_devices
from ..ort.provider import OrtProvider
from ..ort.slot_policy import SlotPolicy
from ..ort.slot_runner import SlotRunner
from ..runners.self_agreement import check_agreement

_PLUGIN = "onnxruntime_ep_webgpu"
_MISSING = "its plugin is not installed; install it with: pip install 'carryall[webgpu]'"
_SOFTWARE = (
    "Without a GPU, Vulkan in software (Mesa's lavapipe 25 or newer, SwiftShader) works with "
    "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1"
)
_SOFTWARE_DEVICE = "CPU"  # the kind of processor that onnxruntime names for adapters in software
# The plugin's attention of 32 and more new tokens is wrong on adapters in software (version 0.4.0).
_SOFTWARE_CHUNK, _CHUNK = 16, 512
_REMEDY = "Use --provider-option prefill_chunk=16"
_PROBE = '<ir_version: 10, opset_import: ["" : 21]> probe (float[2] x) => (float[2] y) { y = Add(x, x) }'


@dataclass(frozen=True, kw_only=True)
class WebGpuOptions(Checked):
    """Options of the provider.

    Args:
        device: index of the adapter.
        compute: ``fp16`` or ``fp32``; ``auto`` is fp16 on hardware, and fp32 on adapters in software.
        bank: slots of one KV buffer, the largest number of sequences in one run. A run of several computes
            the whole bank.
        prefill_chunk: most tokens of a prompt in one run; 0 is 512 on hardware and 16 in software.
        kv_cache_bytes: maximum size of the KV cache in bytes; fewer slots are offered if it holds no more.
        graph_capture: record the commands of each decode run once and replay them; every node must have a
            kernel of the plugin, and no attention a sliding window.
    """

    device: int = option(0, least=0)
    compute: Literal["auto", "fp16", "fp32"] = "auto"
    bank: int = option(8, least=1)
    prefill_chunk: int = option(0, least=0)
    kv_cache_bytes: int = option(4 * 2**30, least=1)
    graph_capture: bool = False


class WebGpuProvider(OrtProvider):
    """A GPU with Direct3D 12, Metal or Vulkan."""

    name = "webgpu"
    vendors = frozenset({"NVIDIA", "AMD", "Intel", "Qualcomm", "Apple"})
    execution_provider = "WebGpuExecutionProvider"
    kernels = WEBGPU
    options: ClassVar[type[Any]] = WebGpuOptions

    def available(self) -> str | None:
        """Return None if the provider can run on this machine, else the reason and the remedy."""
        try:
            _open_probe(_adapters()[0])
        except CarryallError as error:
            return str(error)
        return None

    def device_names(self) -> list[str]:
        """Return the indices of the adapters."""
        return [str(index) for index in range(len(_adapters()))]

    def device_descriptions(self) -> list[str]:
        """Return each adapter with its vendor, and whether it is software."""
        return [_name(index, adapter) for index, adapter in enumerate(_adapters())]

    def devices(self, options: Mapping[str, Any]) -> list[Any]:
        """Return the plugin's device to use."""
        adapters = _adapters()
        if options["device"] >= len(adapters):
            raise UsageError(f"there is no adapter {options['device']}, only {len(adapters)}")
        return [adapters[options["device"]]]

    def provider_options(self, options: Mapping[str, Any], *, generating: bool) -> dict[str, str]:
        """Return options of the execution provider; ``generating`` for a runner, else for other sessions."""
        return {"enableGraphCapture": "1"} if generating and options["graph_capture"] else {}

    def resolve_options(self, config: RunnerConfig) -> RunnerConfig:
        """Decide ``compute=auto`` by the adapter.

        Raises:
            ProviderUnavailableError: ``compute=fp16`` on an adapter without 16-bit floats.
        """
        if self.available() is not None:
            return config
        settled = self._settled(config)
        if settled.options["compute"] == "fp16" and not _has_half(self.devices(settled.options)[0]):
            raise ProviderUnavailableError(
                f"adapter {settled.options['device']} has no 16-bit floats (shader-f16); use compute=fp32"
            )
        return settled

    def passes(self, config: RunnerConfig) -> list[ir.passes.PassBase]:
        """Return the passes that lower a portable decoder graph to slots, in order."""
        return super().passes(self._settled(config))

    def explicit_passes(self, config: RunnerConfig) -> list[ir.passes.PassBase] | None:
        """Return the passes that keep caches as they are, in order."""
        return super().explicit_passes(self._settled(config))

    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        """Load a graph lowered by ``passes`` for generation, with fewer slots if memory is short."""
        session = self._open(model, config, generating=True)
        options = self.checked_options(config.options)
        if SEQLENS_K not in {value.name for value in session.get_inputs()}:
            device = self.cache_memory(session, read_graph(session, str(model)).explicit_inputs, str(model))
            return self._explicit_runner(session, model, config, device, "the graph has explicit KV")
        graph = read_slot_graph(session, str(model))
        if options["graph_capture"] and any(spec.window for spec in graph.caches.values()):
            # The plugin replays the window's place of the captured run, without an error (version 0.4.0).
            raise ProviderUnavailableError(
                f"captured runs of {model} would be wrong, because its attention has a sliding window; "
                "use graph_capture=false"
            )
        device = self.cache_memory(session, graph.caches, str(model))
        host_inputs = {value.name for value in session.get_inputs()} - device_inputs(session).keys()

        def memory(specs: Mapping[str, KVSpec], slots: int, length: int) -> BankedMemory:
            slot_bytes = sum(spec.bytes_per_token for spec in specs.values()) * length
            remedy = "or raise kv_cache_bytes"
            return BankedMemory(
                specs,
                slots_that_fit(options["kv_cache_bytes"], slot_bytes, slots, remedy),
                length,
                device=device,
                session_factory=lambda content: ort.open_session(
                    content, self.execution_provider, None, {}, devices=self.devices(options)
                ),
                host_inputs=host_inputs,
                bank=options["bank"],
            )

        chunk = options["prefill_chunk"] or (_SOFTWARE_CHUNK if self.is_software(options) else _CHUNK)
        policy = SlotPolicy(
            bank=options["bank"], prefill_chunk=chunk, max_scores=2**40, capture=options["graph_capture"]
        )
        runner = SlotRunner(session, config, str(model), memory=memory, policy=policy)
        if graph.hidden_size is None and chunk > _SOFTWARE_CHUNK:
            check_agreement(runner, f"{self.name}, {model},", _REMEDY, chunk=chunk, half=graph.is_half)
        return runner

    def memory_bandwidth(self, options: Mapping[str, Any]) -> float | None:
        """Return the measured bandwidth of the host's memory in bytes/s; None for hardware."""
        return memory_bandwidth() * 1e9 if self.is_software(self.checked_options(options)) else None

    def is_software(self, options: Mapping[str, Any]) -> bool:
        """Whether the chosen adapter computes on the processor."""
        return _is_software(self.devices(options)[0])

    def cache_memory(self, session: Any, caches: Iterable[str], source: str) -> Device:
        """Return the device that holds the caches of an open session."""
        device = cache_device(session, caches, source)
        if device is None:
            raise ProviderUnavailableError(f"{source} reads its caches on the host, not on the adapter")
        return dataclasses.replace(device, updates=True)

    def _settled(self, config: RunnerConfig) -> RunnerConfig:
        options = self.checked_options(config.options)
        if options["compute"] == "auto":
            half = not self.is_software(options) and _has_half(self.devices(options)[0])
            options["compute"] = "fp16" if half else "fp32"
        return dataclasses.replace(config, options=options)


def _adapters() -> tuple[Any, ...]:
    """Return the devices of the plugin.

    Raises:
        ProviderUnavailableError: the plugin is not installed, or has no device.
    """
    library = packaged_library(_PLUGIN)
    if library is None:
        raise ProviderUnavailableError(_MISSING)
    try:
        return plugin_devices(library)
    except ProviderUnavailableError as error:
        raise ProviderUnavailableError(f"{error}. {_SOFTWARE}") from error


def _name(index: int, adapter: Any) -> str:
    """Return an adapter's number with what is known of it; onnxruntime may not know the vendor."""
    known = [adapter.device.vendor] if adapter.device.vendor else []
    known += ["software"] if _is_software(adapter) else []
    return f"{index} ({', '.join(known)})" if known else str(index)


def _is_software(adapter: Any) -> bool:
    return bool(adapter.device.type.name == _SOFTWARE_DEVICE)


@functools.cache
def _open_probe(adapter: Any) -> None:
    """Open a session once: the plugin lists adapters without asking the driver.

    Raises:
        ProviderUnavailableError: the driver offers no adapter.
    """
    content = ir.to_proto(ir.from_onnx_text(_PROBE)).SerializeToString()
    try:
        ort.open_session(content, WebGpuProvider.execution_provider, None, {}, devices=[adapter])
    except CarryallError as error:
        raise ProviderUnavailableError(f"the driver offers no adapter: {error}. {_SOFTWARE}") from error


@functools.cache
def _has_half(adapter: Any) -> bool:
    """Whether an adapter computes 16-bit floats: without them, the plugin fails at the first run."""
    content = ir.to_proto(ir.from_onnx_text(_PROBE.replace("float[", "float16["))).SerializeToString()
    session = ort.open_session(content, WebGpuProvider.execution_provider, None, {}, devices=[adapter])
    try:
        (result,) = session.run(None, {"x": np.ones(2, np.float16)})
    except ort.runtime_errors():
        return False
    return bool((result == 2).all())


PROVIDER = WebGpuProvider
