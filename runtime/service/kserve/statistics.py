"""How often and how long models ran."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Duration:
    """How often something happened, and how long it took in all."""

    count: int = 0
    nanoseconds: int = 0

    def add(self, nanoseconds: int) -> None:
        """Count one more."""
        self.count += 1
        self.nanoseconds += nanoseconds


@dataclass(slots=True)
class ModelCounts:
    """Counts of one model since the server started.

    Args:
        rows: inferences, where a batch counts as many as it has rows.
        last_milliseconds: when the last request ended, since 1970.
    """

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    rows: int = 0
    last_milliseconds: int = 0


class Statistics:
    """Counts by model."""

    def __init__(self) -> None:
        self._models: dict[str, ModelCounts] = {}

    def count(self, model: str, nanoseconds: int, rows: int, *, success: bool) -> None:
        """Count one request that took so long."""
        counts = self._models.setdefault(model, ModelCounts())
        (counts.success if success else counts.fail).add(nanoseconds)
        if success:
            counts.rows += rows
            counts.last_milliseconds = int(time.time() * 1000)

    def of(self, model: str) -> ModelCounts:
        """The counts of a model."""
        return self._models.get(model, ModelCounts())
