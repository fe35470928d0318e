"""A device double with real asynchrony: a thread runs the steps of a toy model, late, one after the other.

It checks what an engine must not do while a step is in flight, and it may draw wrong tokens and fail.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from carryall.errors import ProviderRuntimeError
from carryall.providers.base import BestLogits, Draw, KVEviction, Pending, Row, Runner
from carryall.providers.targets.null import NullRunner

Result = npt.NDArray[np.float32] | BestLogits


@dataclasses.dataclass
class _Job:
    """A submitted step: its rows, how long the device takes, and per row the token it ran and drew."""

    rows: Sequence[Row]
    seconds: float
    fails: bool
    before: _Job | None
    result: Future[list[Result]] = dataclasses.field(default_factory=Future)
    ran: list[npt.NDArray[np.int64]] = dataclasses.field(default_factory=list)
    drawn: list[int] = dataclasses.field(default_factory=list)


class AsyncRunner(Runner):
    """Run the steps of a toy model in a thread; one step may be submitted before another is finished.

    Args:
        model: the toy model, which only the thread uses while a step is in flight.
        seed: chooses delays, the order of rows, wrong draws and faults.
        wrong: the share of drawn tokens that differ from the host's.
        faults: the share of steps that fail.
        seconds: the longest duration of a step.

    Attributes:
        overlaps: how many steps were submitted while another was in flight.
        corrected: how many rows ran a token that was drawn wrong.
        misuse: what the engine did that it must not do while a step is in flight.
    """

    def __init__(
        self,
        model: NullRunner,
        *,
        seed: int = 0,
        wrong: float = 0.0,
        faults: float = 0.0,
        seconds: float = 0.0,
    ) -> None:
        self.info = dataclasses.replace(model.info, steps_ahead=1)
        self.model = model
        self.overlaps = self.corrected = 0
        self.misuse: list[str] = []
        self._random = np.random.default_rng(seed)
        self._wrong, self._faults, self._seconds = wrong, faults, seconds
        self._flying: list[_Job] = []
        self._results: dict[int, list[Any]] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, rows: Sequence[Row]) -> Pending[list[Result]]:
        """Queue a step; ``wait`` returns when the thread has run it."""
        if len(self._flying) > 1:
            self.misuse.append("three steps in flight")
        self.overlaps += bool(self._flying)
        before = self._flying[-1] if self._flying else None
        if before is None and any(row.source is not None for row in rows):
            self.misuse.append("a placeholder without a step in flight")
        fails = bool(self._random.random() < self._faults)
        copies = [dataclasses.replace(row) for row in rows]
        job = _Job(copies, float(self._random.random()) * self._seconds, fails, before)
        self._flying.append(job)
        self._jobs.put(job)
        return Pending(lambda: self._wait(job, rows))

    def _wait(self, job: _Job, rows: Sequence[Row]) -> list[Result]:
        if self._flying[0] is not job:
            self.misuse.append("a later step was waited for first")
        try:
            results = job.result.result()
        finally:
            self._flying.remove(job)
            job.before = None
        for row, ran in zip(rows, job.ran, strict=True):
            if row.source is not None:
                row.tokens[:] = ran
        return results

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            time.sleep(job.seconds)
            try:
                job.result.set_result(self._run(job))
            except Exception as error:  # noqa: BLE001 -- the engine gets it
                job.result.set_exception(error)

    def _run(self, job: _Job) -> list[Result]:
        """Run the rows of a step in random order, with the tokens that the step before has drawn."""
        if job.before is not None and job.before.result.exception() is not None:
            raise ProviderRuntimeError("the step before failed")
        random = np.random.default_rng(len(job.rows))
        results: list[Any] = [None] * len(job.rows)
        job.ran, job.drawn = [row.tokens for row in job.rows], [-1] * len(job.rows)
        for i in random.permutation(len(job.rows)).tolist():
            row = job.rows[i]
            if row.source is not None:
                assert job.before is not None
                row.tokens = np.array([job.before.drawn[row.source]], np.int64)
                job.ran[i] = row.tokens
            (logits,) = self.model.forward([dataclasses.replace(row, source=None)])
            logits = logits.copy()
            results[i] = self.model._best(logits[0]) if row.best_suffice else logits
            if row.draw is not None:
                job.drawn[i] = self._draw(logits[-1], row.draw)
            if job.fails and i % 2:
                raise ProviderRuntimeError("the device fell over")
        if job.fails:
            raise ProviderRuntimeError("the device fell over")
        return results

    def _draw(self, logits: npt.NDArray[np.float32], draw: Draw) -> int:
        """Draw as a simple device would, in float32 over sorted tokens; sometimes draw another token."""
        token = _drawn(logits, draw)
        if self._random.random() < self._wrong:
            self.corrected += 1
            return (token + 1) % len(logits)
        return token

    @property
    def kv_bytes(self) -> int:
        """Memory of the toy model."""
        return self.model.kv_bytes

    def release(self, slot: int) -> None:
        """Free a slot that no step in flight uses."""
        if any(row.slot == slot for job in self._flying for row in job.rows):
            self.misuse.append(f"slot {slot} was freed while a step used it")
        self.model.release(slot)

    def forward(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]:
        """Run rows alone, at once."""
        self._require_idle("forward")
        return self.model.forward(rows)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy, while no step is in flight."""
        self._require_idle("copy_prefix")
        self.model.copy_prefix(source, target, length)

    def trim(self, slot: int, length: int) -> None:
        """Trim, while no step is in flight."""
        self._require_idle("trim")
        self.model.trim(slot, length)

    def evict_kv(self, slot: int, length: int, eviction: KVEviction) -> None:
        """Evict, while no step is in flight."""
        self._require_idle("evict_kv")
        self.model.evict_kv(slot, length, eviction)

    def read_kv(self, slot: int, start: int, length: int) -> list[npt.NDArray[Any]]:
        """Read, while no step is in flight."""
        self._require_idle("read_kv")
        return self.model.read_kv(slot, start, length)

    def write_kv(self, slot: int, start: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        """Write, while no step is in flight."""
        self._require_idle("write_kv")
        self.model.write_kv(slot, start, length, parts)

    def close(self) -> None:
        """End the thread."""
        self._require_idle("close")
        self._jobs.put(None)
        self._thread.join()
        self.model.close()

    def _require_idle(self, what: str) -> None:
        if self._flying:
            self.misuse.append(f"{what} while a step is in flight")


def _drawn(logits: npt.NDArray[np.float32], draw: Draw) -> int:
    if draw.temperature == 0.0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits[order] - logits[order[0]]) / np.float32(draw.temperature))
    if draw.top_k:
        weights[draw.top_k :] = 0
    weights[np.cumsum(weights) - weights >= draw.top_p * weights.sum()] = 0
    weights[weights < draw.min_p] = 0
    mass = np.cumsum(weights)
    return int(order[min(int(np.searchsorted(mass, draw.uniform * mass[-1], "right")), len(order) - 1)])
