"""Prometheus metrics of the memory of devices; there are none on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ....errors import CarryallError
from ....providers.base import DeviceMemory
from ..core.repository import ModelRepository

_log = logging.getLogger(__name__)


class DeviceMetrics(Collector):
    """Collects the memory of the devices that loaded models run on.

    Args:
        models: the models.
    """

    def __init__(self, models: ModelRepository) -> None:
        self._models = models

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: models are not loaded yet when this is registered."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        memories = self._found()
        if not memories:
            return
        used = GaugeMetricFamily(
            "carryall:device_memory_used_bytes", "Device memory used by all processes.", labels=("device",)
        )
        total = GaugeMetricFamily("carryall:device_memory_bytes", "Memory of the device.", labels=("device",))
        for memory in memories.values():
            used.add_metric((memory.device,), memory.used)
            total.add_metric((memory.device,), memory.total)
        yield used
        yield total

    def _found(self) -> dict[str, DeviceMemory]:
        """Return the memory by device. A device that does not answer must not hide all other metrics."""
        memories: dict[str, DeviceMemory] = {}
        for entry in self._models.entries:
            try:
                memories |= {memory.device: memory for memory in entry.device_memory()}
            except CarryallError as error:
                _log.warning("no metrics of the device memory of the model '%s': %s", entry.name, error)
        return memories
