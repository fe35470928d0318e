"""Device providers with the CPU as their device: the providers' code with the CPU's kernels."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from paged_attention_stand_in import PagedStandInPass

from carryall.graph_opt.lower.kernels import CUDA
from carryall.providers.base import DeviceMemory, Runner, RunnerConfig
from carryall.providers.host.libraries import Library
from carryall.providers.ort import ort
from carryall.providers.ort.device_memory import Device
from carryall.providers.runners.thread_runner import ThreadRunner
from carryall.providers.targets.cuda import CARRYALL, CudaOptions, CudaProvider
from carryall.providers.targets.directml import DirectMLOptions, DirectMLProvider
from carryall.providers.targets.tensorrt import TensorRTOptions, TensorRTProvider
from carryall.providers.targets.webgpu import WebGpuOptions, WebGpuProvider

FREE_MEMORY = 2**30

Compute = Literal["fp16", "bf16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class FloatCudaOptions(CudaOptions):
    compute: Compute = "fp32"
    kv_memory: Literal["auto", "paged", "slots"] = "slots"


@dataclass(frozen=True, kw_only=True)
class PagedCudaOptions(FloatCudaOptions):
    kv_memory: Literal["auto", "paged", "slots"] = "paged"


@dataclass(frozen=True, kw_only=True)
class FloatDirectMLOptions(DirectMLOptions):
    compute: Compute = "fp32"


@dataclass(frozen=True, kw_only=True)
class StaticDirectMLOptions(FloatDirectMLOptions):
    static_shapes: bool = True


@dataclass(frozen=True, kw_only=True)
class FloatTensorRTOptions(TensorRTOptions):
    compute: Compute = "fp32"
    chunk: int = 8


@dataclass(frozen=True, kw_only=True)
class SmallWebGpuOptions(WebGpuOptions):
    bank: int = 3


def threaded(runner: Runner) -> Any:
    """Return the runner within the thread of a ``ThreadRunner``, or a runner without a thread itself."""
    return runner.runner if isinstance(runner, ThreadRunner) else runner


class HostStream:
    """A stream of the CPU, whose work is done when it is given."""

    handle = 0

    def host(self, size: int) -> npt.NDArray[np.uint8]:
        return np.zeros(size, np.uint8)

    def copy(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def mark(self) -> Callable[[], None]:
        return lambda: None


class _OnCpu:
    """Replace the parts of a provider that need a device."""

    execution_provider: Any = ort.CPU
    device_name = "cpu"

    def available(self) -> str | None:
        return None

    def enter(self, index: int) -> None:
        pass

    def buffer(self, index: int, size: int) -> Any:
        value = Device(name="cpu").allocate([size], np.dtype(np.uint8))
        value.update_inplace(np.zeros(size, np.uint8))
        return value

    def stream(self, index: int) -> HostStream:
        return HostStream()

    def provider_options(self, options: Mapping[str, Any], *, generating: bool) -> dict[str, str]:
        return {}


class CudaOnCpu(_OnCpu, CudaProvider):
    """CUDA in fp32 for tight tolerances; norms are outside of attention, as the CPU's kernel refuses them."""

    name = "cuda-on-cpu"
    kernels = dataclasses.replace(CUDA, norms_in_attention=False, float_attention=True)
    options: ClassVar[type[Any]] = FloatCudaOptions

    def free_memory(self, options: Mapping[str, Any]) -> int:
        return FREE_MEMORY

    def device_memory(self, options: Mapping[str, Any]) -> DeviceMemory:
        return DeviceMemory("cpu:0", 0, FREE_MEMORY)

    def memory_bandwidth(self, options: Mapping[str, Any]) -> float:
        return 1e12

    def compute_capability(self, index: int) -> tuple[int, int]:
        return 8, 0

    def device_facts(self, index: int) -> Mapping[str, int]:
        return {"major": 8, "minor": 0}

    def _chosen_kernels(self, options: Mapping[str, Any]) -> str:
        return "onnxruntime"  # carryall's run on a device only; see ``cuda_emulator.py``


class PagedCudaOnCpu(CudaOnCpu):
    """CUDA with paged KV; PagedAttention is decomposed, because it has only a CUDA kernel."""

    name = "paged-cuda-on-cpu"
    kernels = dataclasses.replace(CUDA, float_attention=True)
    options: ClassVar[type[Any]] = PagedCudaOptions

    def block_size(self, head_size: int) -> int:
        return 16

    def passes(self, config: RunnerConfig) -> list[ir.passes.PassBase]:
        return [*super().passes(config), PagedStandInPass()]

    def _small_session(self, index: int, content: bytes, kernels: str = CARRYALL) -> Any:
        proto = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(content))
        model = ir.serde.deserialize_model(proto)
        if PagedStandInPass()(model).modified:
            model.graph.opset_imports[""] = 23  # of RotaryEmbedding
        return super()._small_session(index, ir.to_proto(model).SerializeToString(), kernels)


class DirectMLOnCpu(_OnCpu, DirectMLProvider):
    name = "directml-on-cpu"
    options: ClassVar[type[Any]] = FloatDirectMLOptions


class StaticDirectMLOnCpu(DirectMLOnCpu):
    name = "static-directml-on-cpu"
    options: ClassVar[type[Any]] = StaticDirectMLOptions


class WebGpuOnCpu(_OnCpu, WebGpuProvider):
    name = "webgpu-on-cpu"
    options: ClassVar[type[Any]] = SmallWebGpuOptions

    def is_software(self, options: Mapping[str, Any]) -> bool:
        return True

    def devices(self, options: Mapping[str, Any]) -> list[Any]:
        return []

    def cache_memory(self, session: Any, caches: Iterable[str], source: str) -> Device:
        return Device(name="cpu", addressable=False)


class TensorRTOnCpu(_OnCpu, TensorRTProvider):
    name = "tensorrt-on-cpu"
    options: ClassVar[type[Any]] = FloatTensorRTOptions

    def libraries(self) -> list[Library]:
        return []

    def shape_options(self, *_: Any) -> dict[str, str]:
        return {}

    def cache_options(self, *_: Any) -> dict[str, str]:
        return {}


STAND_INS = {
    provider.name: provider
    for provider in (
        CudaOnCpu,
        PagedCudaOnCpu,
        DirectMLOnCpu,
        StaticDirectMLOnCpu,
        TensorRTOnCpu,
        WebGpuOnCpu,
    )
}
