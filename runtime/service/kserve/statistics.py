"""Counts and durations of requests by model."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Duration:
    """The number of events and their total duration in nanoseconds."""

    count: int = 0
    nanoseconds: int = 0

    def add(self, nanoseconds: int) -> None:
        """Add one event."""
        self.count += 1
        self.nanoseconds += nanoseconds


@dataclass(slots=True)
class ModelCounts:
    """Counts of one model since the server started.

    Args:
        success: requests that succeeded.
        fail: requests that failed or were cancelled.
        rows: inferences of successful requests; a batch counts once per row.
        last_milliseconds: the end of the last successful request, in milliseconds since 1970.
    """

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    rows: int = 0
    last_milliseconds: int = 0


class Statistics:
    """The counts of all models, by model name."""

    def __init__(self) -> None:
        self._models: dict[str, ModelCounts] = {}

    def count(self, model: str, nanoseconds: int, rows: int, *, success: bool) -> None:
        """Count one request with its duration and its number of rows."""
        counts = self._models.setdefault(model, ModelCounts())
        (counts.success if success else counts.fail).add(nanoseconds)
        if success:
            counts.rows += rows
            counts.last_milliseconds = int(time.time() * 1000)

    def of(self, model: str) -> ModelCounts:
        """Return the counts of a model."""
        return self._models.get(model, ModelCounts())
