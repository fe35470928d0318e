"""The provider ``nv_tensorrt_rtx``: GeForce and RTX GPUs through TensorRT for RTX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CarryallError, ProviderUnavailableError
from ..host import nvidia
from ..host.libraries import Library
from ..ort.plugins import packaged_library, plugin_devices
from .tensorrt import TensorRTProvider

_PLUGIN = "onnxruntime_ep_nv_tensorrt_rtx"
_REMEDY = "or install the plugin for onnxruntime: pip install 'carryall[tensorrt-rtx]'"


class NvTensorRtRtxProvider(TensorRTProvider):
    """A CUDA device through TensorRT for RTX: the plugin package, or an onnxruntime that was built with it.

    Options: those of ``tensorrt``.
    """

    name = "nv_tensorrt_rtx"
    execution_provider = "NvTensorRTRTXExecutionProvider"
    prefix = "nv"

    def available(self) -> str | None:
        """Return None if the provider can run on this machine, else the reason and the remedy."""
        try:
            library = packaged_library(_PLUGIN)
            if library is None:
                reason = super().available()
                return None if reason is None else f"{reason}; {_REMEDY}"
            plugin_devices(library)
        except CarryallError as error:
            return str(error)
        return None

    def device_names(self) -> list[str]:
        """Return the numbers of the devices."""
        library = packaged_library(_PLUGIN)
        if library is None:
            return super().device_names()
        return [str(index) for index in range(len(plugin_devices(library)))]

    def devices(self, options: Mapping[str, Any]) -> list[Any]:
        """Return the plugin's device to use; none for a built-in provider."""
        library = packaged_library(_PLUGIN)
        if library is None:
            return []
        found = plugin_devices(library)
        if options["device"] >= len(found):
            raise ProviderUnavailableError(f"there is no device {options['device']}, only {len(found)}")
        return [found[options["device"]]]

    def enter(self, index: int) -> None:
        """Make this thread ready for a device; a plugin brings its own CUDA runtime."""
        if packaged_library(_PLUGIN) is None:
            super().enter(index)

    def libraries(self) -> list[Library]:
        """Return the required libraries; TensorRT for RTX itself is part of the onnxruntime wheel."""
        return nvidia.cuda_libraries()

    def provider_options(self, options: Mapping[str, Any], *, generating: bool) -> dict[str, str]:
        """Return the options of the execution provider; a plugin's device is not among them."""
        return {} if packaged_library(_PLUGIN) is not None else {"device_id": str(options["device"])}

    def cache_options(self, folder: Path) -> dict[str, str]:
        """Return the option with the folder of compiled kernels."""
        return {"nv_runtime_cache_path": str(folder)}


PROVIDER = NvTensorRtRtxProvider
