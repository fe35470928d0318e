"""Prometheus metrics of tensor models with Triton's names and meanings.

See https://github.com/triton-inference-server/server/blob/main/docs/user_guide/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ..core.repository import ModelRepository
from .statistics import Duration, ModelCounts, Statistics


def _microseconds(of: Callable[[ModelCounts], Duration]) -> Callable[[ModelCounts], float]:
    return lambda counts: of(counts).nanoseconds / 1000


_METRICS: dict[str, tuple[str, Callable[[ModelCounts], float]]] = {
    "request_success": ("Requests that succeeded.", lambda counts: counts.success.count),
    "request_failure": ("Requests that failed or were cancelled.", lambda counts: counts.fail.count),
    "count": ("Inferences; a batch counts once per row.", lambda counts: counts.rows),
    "exec_count": ("Runs of the model; requests of one batch share one.", lambda counts: counts.runs),
    "request_duration_us": ("Time of successful requests.", _microseconds(lambda counts: counts.success)),
    "queue_duration_us": ("Time in the queue.", _microseconds(lambda counts: counts.queue)),
    "compute_input_duration_us": (
        "Time of checking and converting inputs.",
        _microseconds(lambda counts: counts.compute_input),
    ),
    "compute_infer_duration_us": ("Time of runs.", _microseconds(lambda counts: counts.compute_infer)),
    "compute_output_duration_us": (
        "Time of making outputs.",
        _microseconds(lambda counts: counts.compute_output),
    ),
}


class TensorMetrics(Collector):
    """Collects the counts of tensor models, and the lengths of their queues.

    Args:
        models: the models.
        statistics: their counts.
    """

    def __init__(self, models: ModelRepository, statistics: Statistics) -> None:
        self._models, self._statistics = models, statistics

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: models are not loaded yet when this is registered."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        tensors = [entry for entry in self._models.entries if entry.loader.kind == "tensor"]
        for name, (text, read) in _METRICS.items():
            # Prometheus' own counters would add a suffix to Triton's names.
            metric = Metric(f"nv_inference_{name}", text, "unknown")
            for entry in tensors:
                counts = self._statistics.of(entry.name, entry.version)
                metric.add_sample(metric.name, _labels(entry.name, entry.version), read(counts))
            yield metric
        pending = Metric("nv_inference_pending_request_count", "Requests in the queue.", "gauge")
        for entry in tensors:
            batcher = entry.tensor.batcher if entry.tensor is not None else None
            waiting = batcher.waiting if batcher is not None else 0
            pending.add_sample(pending.name, _labels(entry.name, entry.version), waiting)
        yield pending


def _labels(name: str, version: str) -> dict[str, str]:
    return {"model": name, "version": version}
