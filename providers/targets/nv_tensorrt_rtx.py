"""The provider ``nv_tensorrt_rtx``: GeForce and RTX GPUs through TensorRT for RTX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..host import nvidia
from ..host.libraries import Library
from .tensorrt import TensorRTProvider


class NvTensorRtRtxProvider(TensorRTProvider):
    """A CUDA device through TensorRT for RTX, with an onnxruntime that was built with it.

    Options: those of ``tensorrt``.
    """

    name = "nv_tensorrt_rtx"
    execution_provider = "NvTensorRTRTXExecutionProvider"
    prefix = "nv"
    int4 = True  # its networks are strongly typed, which needs no builder flag

    def libraries(self) -> list[Library]:
        """Return the required libraries; TensorRT for RTX itself is part of the onnxruntime wheel."""
        return nvidia.cuda_libraries()

    def provider_options(self, options: Mapping[str, Any], *, generating: bool) -> dict[str, str]:
        """Return the options of the execution provider."""
        return {"device_id": str(options["device"])}

    def type_options(self, model: Path) -> dict[str, str]:
        """Return nothing: dtypes are those of the graph."""
        return {}

    def cache_options(self, folder: Path) -> dict[str, str]:
        """Return the option with the folder of compiled kernels."""
        return {"nv_runtime_cache_path": str(folder)}


PROVIDER = NvTensorRtRtxProvider
