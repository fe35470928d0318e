"""The provider ``tensorrt``: NVIDIA GPUs through TensorRT, whose engines are built once and cached."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import onnx_ir as ir

from ...errors import UsageError
from ...graph_opt.lower.kernels import Kernels
from ...graph_opt.lower.pipelines.standard import standard_passes
from ...options import Checked, option
from ...records import dataclass
from ...storage.root import cache_root
from ..base import Runner, RunnerConfig
from ..host import nvidia
from ..host.libraries import Library
from ..host.nvidia_provider import NvidiaProvider
from ..ort import ort
from ..ort.explicit import OrtExplicitSession
from ..ort.provider import compute_type
from ..ort.tensorrt_options import EngineCache, ShapeRange, input_shapes, model_facts
from ..runners.explicit_runner import ExplicitRunner

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TensorRTOptions(Checked):
    """Options of the provider.

    Args:
        device: index of the device, within CUDA_VISIBLE_DEVICES.
        compute: ``fp16``, ``bf16``, or ``fp32``.
        chunk: maximum new tokens of a run; engines are built for this maximum.
        cache_folder: the folder for engines; empty is the cache of carryall, see ``CARRYALL_CACHE``.
    """

    device: int = option(0, least=0)
    compute: Literal["fp16", "bf16", "fp32"] = "fp16"
    chunk: int = option(512, least=1)
    cache_folder: str = ""


class TensorRTProvider(NvidiaProvider):
    """A CUDA device through TensorRT 10."""

    name = "tensorrt"
    execution_provider = "TensorrtExecutionProvider"
    kernels = Kernels()
    takes_loras = False  # engines are built for known ranges of shapes
    prefix: ClassVar[str] = "trt"  # of ONNX Runtime's options
    options: ClassVar[type[Any]] = TensorRTOptions

    def libraries(self) -> list[Library]:
        """Return the required libraries."""
        return [*nvidia.cuda_libraries(), nvidia.cudnn(), *nvidia.tensorrt_libraries()]

    def passes(self, config: RunnerConfig) -> list[ir.passes.PassBase]:
        """Return the passes that lower a portable decoder graph to standard operators, in order."""
        if config.context_length is None:
            raise UsageError("lowering needs RunnerConfig.context_length: rope tables have that length")
        options = self.checked_options(config.options)
        compute = compute_type(options["compute"])
        return standard_passes(config.context_length, compute, int4=True)

    def provider_options(self, options: Mapping[str, Any], *, generating: bool) -> dict[str, str]:
        """Return the options of the execution provider; engines and timings are always cached.

        ONNX Runtime builds strongly typed networks, which compute in the types of the graph and accept int4,
        only if no type is enabled here.
        """
        folder = _cache_root(options["cache_folder"])
        return {
            "device_id": str(options["device"]),
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": str(folder / "engines"),
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": str(folder),
        }

    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        """Load a graph lowered by ``passes``; engines are built at the first load, which takes minutes."""
        options = self.checked_options(config.options)
        settings = self.provider_options(options, generating=True)
        settings |= self.shape_options(model, config, options)
        cache = EngineCache(
            _cache_root(options["cache_folder"]) / "engines",
            {"model": model_facts(model), "options": settings, "wheels": ort.installed_wheels()},
        )
        if not cache.ready():
            _log.warning("building TensorRT engines for %s; this takes minutes, but only once", model)
        settings |= self.cache_options(cache.folder)
        session = self._open(model, config, generating=True, provider_settings=settings)
        runner = ExplicitRunner(
            OrtExplicitSession(session, self.device(options["device"]), str(model)),
            config,
            str(model),
            chunk=options["chunk"],
        )
        cache.record()
        return runner

    def shape_options(self, model: Path, config: RunnerConfig, options: Mapping[str, Any]) -> dict[str, str]:
        """Return the options with the shapes that engines are built for."""
        if config.context_length is None:
            raise UsageError(
                f"provider '{self.name}' builds engines for RunnerConfig.context_length; give it"
            )
        shapes = ShapeRange(chunk=options["chunk"], context_length=config.context_length)
        kinds = zip(("min", "opt", "max"), shapes.profiles(input_shapes(model)), strict=True)
        return {f"{self.prefix}_profile_{kind}_shapes": text for kind, text in kinds}

    def cache_options(self, folder: Path) -> dict[str, str]:
        """Return the option with the folder of this model's engines."""
        return {"trt_engine_cache_path": str(folder)}


def _cache_root(folder: str) -> Path:
    return (Path(folder) if folder else cache_root()) / "tensorrt"


PROVIDER = TensorRTProvider
