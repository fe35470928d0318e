"""GeForce and RTX GPUs through TensorRT for RTX: as ``tensorrt``, with kernels compiled on the device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..host import nvidia
from ..host.libraries import Library
from .tensorrt import TensorRTProvider


class NvTensorRtRtxProvider(TensorRTProvider):
    """A CUDA device through TensorRT for RTX, in an onnxruntime that was built with it.

    Options: those of ``tensorrt``.
    """

    name = "nv_tensorrt_rtx"
    execution_provider = "NvTensorRTRTXExecutionProvider"
    prefix = "nv"
    int4 = True  # networks are strongly typed, which needs no flags

    def libraries(self) -> list[Library]:
        """What must be loadable; its own library comes with the wheel that has this provider."""
        return nvidia.cuda_libraries()

    def provider_options(self, options: Mapping[str, Any], *, generating: bool) -> dict[str, str]:
        """Options of the execution provider itself. Types are those of the graph."""
        return {"device_id": str(options["device"])}

    def type_options(self, model: Path) -> dict[str, str]:
        """Nothing: types are those of the graph."""
        return {}

    def cache_options(self, folder: Path) -> dict[str, str]:
        """Where compiled kernels lie."""
        return {"nv_runtime_cache_path": str(folder)}


PROVIDER = NvTensorRtRtxProvider
