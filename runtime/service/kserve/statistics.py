"""Counts and durations of requests, by model and version."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import field

from ....records import dataclass

_MOST_SIZES = 1024


@dataclass(slots=True)
class Duration:
    """The number of events and their total duration in nanoseconds."""

    count: int = 0
    nanoseconds: int = 0

    def add(self, nanoseconds: int) -> None:
        """Add one event."""
        self.count += 1
        self.nanoseconds += nanoseconds


@dataclass(frozen=True, slots=True)
class Times:
    """Where the time of a tensor request went, in nanoseconds.

    Args:
        queue: waiting for a batch.
        input: checking and converting the inputs.
        infer: the run of the model, with all requests of the batch.
        output: making the outputs.
        runs: the runs of the model that began with this request; see ``RunTime``.
        batch: the rows of the run, with all requests of the batch.
    """

    queue: int
    input: int
    infer: int
    output: int
    runs: int
    batch: int


@dataclass(slots=True)
class BatchCounts:
    """Runs of one batch size: times of their requests' inputs and outputs, and of the runs themselves."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)

    def durations(self) -> Iterator[tuple[str, Duration]]:
        """Yield the durations with their names in the protocol."""
        for name in ("compute_input", "compute_infer", "compute_output"):
            yield name, getattr(self, name)

    def add(self, times: Times) -> None:
        """Add a request; each run counts once, with its first request."""
        parts = (times.input, times.infer if times.runs else 0, times.output)
        for (_, duration), nanoseconds in zip(self.durations(), parts, strict=True):
            duration.count += times.runs
            duration.nanoseconds += nanoseconds


@dataclass(slots=True)
class ModelCounts:
    """Counts of one version of a model since the server started.

    Args:
        success: requests that succeeded.
        fail: requests that failed or were cancelled.
        queue, compute_input, compute_infer, compute_output: the parts of successful tensor requests; see
            ``Times``.
        rows: inferences of successful requests; a batch counts once per row.
        runs: runs of the model; requests of one batch share one.
        batches: counts by rows of a run; of the first 1,024 sizes, since clients choose them.
        last_milliseconds: the end of the last successful request, in milliseconds since 1970.
    """

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    rows: int = 0
    runs: int = 0
    batches: dict[int, BatchCounts] = field(default_factory=dict)
    last_milliseconds: int = 0

    def durations(self) -> Iterator[tuple[str, Duration]]:
        """Yield the durations with their names in the protocol."""
        for name in ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"):
            yield name, getattr(self, name)

    def succeeded(self, nanoseconds: int, rows: int, times: Times | None) -> None:
        """Count a request that succeeded; without ``times``, it counts as one run."""
        self.success.add(nanoseconds)
        self.rows += rows
        self.runs += 1 if times is None else times.runs
        self.last_milliseconds = int(time.time() * 1000)
        if times is not None:
            self.queue.add(times.queue)
            self.compute_input.add(times.input)
            self.compute_infer.add(times.infer)
            self.compute_output.add(times.output)
            if times.batch in self.batches or len(self.batches) < _MOST_SIZES:
                self.batches.setdefault(times.batch, BatchCounts()).add(times)


class Statistics:
    """The counts of all models, by name and version."""

    def __init__(self) -> None:
        self._models: dict[tuple[str, str], ModelCounts] = {}

    def of(self, model: str, version: str) -> ModelCounts:
        """Return the counts of a version of a model."""
        return self._models.setdefault((model, version), ModelCounts())
