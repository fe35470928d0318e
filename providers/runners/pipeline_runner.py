"""A runner of one model whose layers are stages in other threads, processes or hosts, which compute at once.

A step's rows are cut into batches. While a stage computes one of them, the stage before computes the next
(GPipe, arXiv:1811.06965, without its backward pass). The rows of the next step begin as soon as the batch
with their tokens is through, so that stages do not wait at the end of each step either.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ProviderRuntimeError
from ...records import dataclass
from ..base import BestLogits, Draw, KVEviction, Pending, Row
from .filled_slots import FilledSlots
from .remote_runner import RemoteRunner
from .split_runner import SplitRunner

_log = logging.getLogger(__name__)

# A prompt is not cut into fewer tokens: each batch reads all weights.
_LEAST_TOKENS = 32
_MOST_LIKELY = 64  # tokens among which the next one is drawn, if the options keep more

Logits = npt.NDArray[np.float32]


class PipelineStage(RemoteRunner):
    """A runner of some layers that is given rows before it has computed others; it computes all in order."""

    @abc.abstractmethod
    def begin(self, rows: Sequence[Row], states: Any) -> Any:
        """Let the stage compute rows; return what ``end``, or ``begin`` of the next stage, takes.

        Args:
            rows: as for ``forward``, without hidden states.
            states: what ``begin`` of the stage before returned; None for the first.
        """

    @abc.abstractmethod
    def end(self, begun: Any) -> list[Logits]:
        """Wait for rows; return the result of ``forward``, which stays valid.

        Raises:
            ProviderRuntimeError: the stage, or one before, has ended or does not answer.
            CarryallError: ``forward`` raised it.
        """

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """Run one step; see ``Runner.forward``."""
        return self.end(self.begin(rows, None))

    @abc.abstractmethod
    def alive(self) -> bool:
        """Whether the stage answers; wait for it."""

    @abc.abstractmethod
    def restart(self) -> None:
        """Start a stage again that has ended, without KV.

        Raises:
            ProviderRuntimeError: there is no place for it.
        """

    @property
    @abc.abstractmethod
    def busy_seconds(self) -> float:
        """How long it has computed rows, as of its last answer."""


@dataclass(slots=True)
class _Batch:
    """Rows that pass the stages together: parts of the step's rows ``indices``."""

    indices: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    begun: Any = None
    waits: bool = True  # for being begun


@dataclass(slots=True)
class _Flight:
    """A step in flight: its rows, its batches, and the tokens drawn so far by row."""

    rows: Sequence[Row]
    before: _Flight | None
    batches: list[_Batch]
    places: dict[int, int]  # by row, the batch of its last token
    drawn: dict[int, int] = field(default_factory=dict)
    failed: bool = False


class PipelineRunner(SplitRunner):
    """A ``Runner`` that keeps several batches of rows in flight over stages of layers.

    If a stage ends, the step fails, and the KV of all slots is lost; the stage is started again by the next
    call.

    Args:
        stages: runners of consecutive layers; all except the last return hidden states as logits. They are
            closed with this runner.
        batches: number of batches of a step; at least as many as stages keep all of them busy.

    Attributes:
        stages: as given.
        batches: as given; it may be changed between steps.
    """

    def __init__(self, stages: Sequence[PipelineStage], batches: int) -> None:
        super().__init__(stages)
        self.stages = list(stages)
        self.info = dataclasses.replace(self.info, steps_ahead=1, step_tokens=self.info.step_tokens * batches)
        self.batches = batches
        self._flights: list[_Flight] = []
        self._filled = FilledSlots("a stage")
        self._ended = list[PipelineStage]()
        self._stale = set[int]()  # slots in which other stages than those hold KV

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """Run one step; see ``Runner.forward``."""
        return self._wait(self._submitted(rows))

    def submit(self, rows: Sequence[Row]) -> Pending[list[Logits | BestLogits]]:
        """Begin one step; see ``Runner``."""
        flight = self._submitted(rows)
        return Pending(lambda: [*self._wait(flight)])

    def take_lost(self) -> set[int]:
        """Return the slots whose KV was lost since the last call, because a stage ended."""
        return self._filled.take_lost()

    @property
    def busy_seconds(self) -> list[float]:
        """How long each stage has computed rows, as of its last answer."""
        return [stage.busy_seconds for stage in self.stages]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        with self._watched(source):
            super().copy_prefix(source, target, length)
        self._filled.add(target)

    def release(self, slot: int) -> None:
        if slot in self._filled:
            with self._watched():
                super().release(slot)
            self._filled.discard(slot)

    def trim(self, slot: int, length: int) -> None:
        if slot in self._filled:
            with self._watched():
                super().trim(slot, length)

    def evict_kv(self, slot: int, length: int, eviction: KVEviction) -> None:
        with self._watched(slot):
            super().evict_kv(slot, length, eviction)

    def read_kv(self, slot: int, start: int, length: int) -> list[npt.NDArray[Any]]:
        with self._watched(*[slot] * bool(length)):
            return super().read_kv(slot, start, length)

    def write_kv(self, slot: int, start: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        with self._watched():
            super().write_kv(slot, start, length, parts)
        self._filled.add(slot)

    def read_state(self, slot: int, length: int) -> list[npt.NDArray[Any]]:
        with self._watched(slot):
            return super().read_state(slot, length)

    def write_state(self, slot: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        with self._watched(slot):
            super().write_state(slot, length, parts)

    def _submitted(self, rows: Sequence[Row]) -> _Flight:
        if not self._flights:
            self._revive()
        self._filled.check(row.slot for row in rows if row.start)
        self._filled.add(*(row.slot for row in rows))
        before = self._flights[-1] if self._flights else None
        sources = [0 if before is None or row.source is None else before.places[row.source] for row in rows]
        batches = _batches(rows, sorted(range(len(rows)), key=sources.__getitem__), self.batches)
        places = {index: number for number, batch in enumerate(batches) for index in batch.indices}
        flight = _Flight(rows, before, batches, places)
        self._flights.append(flight)
        self._advance(flight)
        return flight

    def _advance(self, flight: _Flight) -> None:
        """Give the stages the batches whose tokens are known, in order."""
        known = {} if flight.before is None else flight.before.drawn
        for batch in flight.batches:
            sources = [flight.rows[index].source for index in batch.indices]
            if any(source is not None and source not in known for source in sources):
                return
            if not batch.waits:
                continue
            for row, source in zip(batch.rows, sources, strict=True):
                if source is not None:
                    row.tokens = np.array([known[source]], np.int64)
            states = None
            for stage in self.stages[:-1]:
                whole = [dataclasses.replace(row, num_logits=len(row.tokens)) for row in batch.rows]
                states = stage.begin(whole, states)
            batch.begun, batch.waits = self.stages[-1].begin(batch.rows, states), False

    def _wait(self, flight: _Flight) -> list[Logits]:
        """Return the logits of a step, and begin what waits for its tokens.

        Raises:
            ProviderRuntimeError: a stage failed, now or in the step before.
        """
        results: list[list[Logits]] = [[] for _ in flight.rows]
        try:
            if flight.before is not None and flight.before.failed:
                raise ProviderRuntimeError("the step before this one failed")
            while flight.batches:
                self._take(flight, flight.batches[0], results)
                del flight.batches[0]
                for later in self._flights[1:]:
                    self._advance(later)
        except BaseException:
            flight.failed = True
            for batch in flight.batches:
                if not batch.waits:
                    with contextlib.suppress(ProviderRuntimeError):
                        self.stages[-1].end(batch.begun)
            self._find_ended()
            raise
        finally:
            self._flights.remove(flight)
            flight.before = None
        return [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in results]

    def _take(self, flight: _Flight, batch: _Batch, results: list[list[Logits]]) -> None:
        """Take the logits of a batch from the last stage, and draw the tokens that the next step needs."""
        logits = self.stages[-1].end(batch.begun)
        for index, part, own in zip(batch.indices, batch.rows, logits, strict=True):
            row = flight.rows[index]
            results[index].append(own)
            if row.source is not None:
                row.tokens[:] = part.tokens
            if row.draw is not None and len(own):
                flight.drawn[index] = _drawn(own[-1], row.draw)

    @contextlib.contextmanager
    def _watched(self, *slots: int) -> Iterator[None]:
        """Let the stages do something to slots that hold KV; notice if one of them has ended."""
        if not self._flights:
            self._revive()
        self._filled.check(slots)
        try:
            yield
        except ProviderRuntimeError:
            self._find_ended()
            raise

    def _find_ended(self) -> None:
        """Find the stages that have ended; what slots held is lost."""
        ended = [stage for stage in self.stages if stage not in self._ended and not stage.alive()]
        if ended:
            self._ended += ended
            self._stale |= self._filled.lose()

    def _revive(self) -> None:
        """Start the stages again that have ended."""
        while self._ended:
            number = self.stages.index(self._ended[0])
            _log.warning("stage %d of %d has ended and is started again", number, len(self.stages))
            self._ended[0].restart()
            del self._ended[0]
        while self._stale:
            slot = self._stale.pop()
            for stage in self.stages:
                stage.release(slot)


def _batches(rows: Sequence[Row], order: Sequence[int], count: int) -> list[_Batch]:
    """Cut rows, taken in an order, into about ``count`` batches of equal numbers of tokens."""
    size = math.ceil(sum(len(row.tokens) for row in rows) / count)
    batches, room = [_Batch()], size
    for index in order:
        row, begin = rows[index], 0
        while begin < (length := len(row.tokens)):
            if room <= 0:
                batches.append(_Batch())
                room = size
            end = min(length, begin + max(room, _LEAST_TOKENS))
            if row.proposed or row.source is not None or length - end < _LEAST_TOKENS:
                end = length
            batches[-1].indices.append(index)
            batches[-1].rows.append(_part(row, begin, end))
            begin, room = end, room - (end - begin)
    return batches


def _part(row: Row, begin: int, end: int) -> Row:
    """Return the tokens [begin, end) of a row as a row."""
    stop = row.start + end
    return dataclasses.replace(
        row,
        tokens=row.tokens[begin:end],
        start=row.start + begin,
        num_logits=max(0, end - max(begin, len(row.tokens) - row.num_logits)),
        checkpoints=[length for length in row.checkpoints if length < stop],
        best_suffice=False,
        draw=None,
        source=None,
    )


def _drawn(logits: npt.NDArray[np.float32], draw: Draw) -> int:
    """Draw a token as the host will, except for rounding; see ``Draw``."""
    if draw.temperature == 0.0:
        return int(logits.argmax())
    # Beyond the most likely tokens the host draws in another order, which only costs another run of the row.
    count = min(draw.top_k or _MOST_LIKELY, len(logits))
    order = np.sort(np.argpartition(logits, -count)[-count:])
    order = order[np.argsort(-logits[order], kind="stable")]
    scaled = (logits - logits[order[0]]) / np.float32(draw.temperature)
    weights = np.exp(scaled[order])
    total = weights.sum() if draw.top_k else np.exp(scaled).sum()
    below = np.cumsum(weights) - weights
    weights[(below >= draw.top_p * total) | (weights < draw.min_p)] = 0.0
    mass = np.cumsum(weights)
    place = int(np.searchsorted(mass, draw.uniform * (total if weights[-1] else mass[-1]), "right"))
    return int(order[min(place, len(order) - 1)])
