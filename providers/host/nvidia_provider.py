"""What the providers of NVIDIA devices share: which libraries they need, and how devices are found."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import CarryallError, ProviderUnavailableError
from ..base import DeviceMemory, RunnerConfig
from ..ort.device_block import DeviceStream
from ..ort.device_memory import Device
from ..ort.provider import OrtProvider
from . import libraries, nvidia
from .libraries import Library


class NvidiaProvider(OrtProvider):
    """A CUDA device through an execution provider of ONNX Runtime."""

    device_name = "cuda"

    def available(self) -> str | None:
        """None if this provider can run here, else what is missing and what to do about it."""
        lacking = super().available() or libraries.complaint(libraries.missing(self.libraries()))
        if lacking is not None:
            return lacking
        try:
            complaints = [self.complaint(index) for index in range(nvidia.device_count())]
        except CarryallError as error:
            return str(error)
        if not complaints:
            return "there is no CUDA device; CUDA_VISIBLE_DEVICES may hide it"
        return None if None in complaints else complaints[0]

    def complaint(self, index: int) -> str | None:
        """Return why models cannot run on a device, None if they can."""
        return None

    def libraries(self) -> list[Library]:
        """What must be loadable."""
        return nvidia.cuda_libraries()

    def device(self, index: int) -> Device:
        """Return the device for ONNX Runtime's memory and bindings."""
        enter, buffer = partial(self.enter, index), partial(self.buffer, index)
        stream = partial(self.stream, index)
        return Device(name=self.device_name, index=index, enter=enter, buffer=buffer, stream=stream)

    def buffer(self, index: int, size: int) -> Any:
        """Allocate bytes of a device for a cache; the object that owns them has ``data_ptr()``."""
        return nvidia.Buffer(index, size)

    def stream(self, index: int) -> DeviceStream:
        """Make a stream of a device."""
        return nvidia.Stream(index)

    def enter(self, index: int) -> None:
        """Make this thread ready for a device."""
        nvidia.enter(index)

    def _open(self, model: Path, config: RunnerConfig, **named: Any) -> Any:
        if self.available() is None:
            device = self.checked_options(config.options)["device"]
            self.enter(device)
            if (complaint := self.complaint(device)) is not None:
                raise ProviderUnavailableError(f"provider '{self.name}' is not available: {complaint}")
        return super()._open(model, config, **named)

    def free_memory(self, options: Mapping[str, Any]) -> int:
        """Return the free memory of the device in bytes."""
        return nvidia.memory(self.checked_options(options)["device"])[0]

    def device_memory(self, options: Mapping[str, Any]) -> DeviceMemory:
        """Return the memory of the device."""
        index = self.checked_options(options)["device"]
        self.enter(index)  # this thread must not disturb captures of others
        free, total = nvidia.memory(index)
        return DeviceMemory(f"{self.device_name}:{index}", total - free, total)

    def memory_bandwidth(self, options: Mapping[str, Any]) -> float:
        """Return the measured bandwidth of the device's memory in bytes/s."""
        return nvidia.memory_bandwidth(self.checked_options(options)["device"])

    def device_names(self) -> list[str]:
        """Numbers of the CUDA devices."""
        return [str(index) for index in range(nvidia.device_count())]
