"""A runner of one model that is cut by weights over several processes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import selectors
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import CarryallError, ProviderRuntimeError
from ..base import KVEviction, Row, Runner, RunnerConfig, RunnerInfo
from ..numa import NumaNode
from .filled_slots import FilledSlots
from .ranks_memory import RanksMemory
from .runner_process import RunnerProcess, opened_info

_log = logging.getLogger(__name__)

PATIENCE = 60.0  # seconds that a rank waits for the others in a step
_LAST_WORDS = 5.0  # seconds that ranks have to answer once one of them has ended


class ShardedRunner(Runner):
    """A ``Runner`` over processes that run the same steps, each on its part of the weights and of the KV.

    If a rank ends, or does not answer, the step fails and all ranks are started again by the next one; the
    KV of all slots is lost.

    Args:
        provider: the name of the provider of each process.
        models: the lowered graph of each rank, see ``graph_opt.shard``.
        configs: options of each process.
        nodes: the NUMA node of each rank, to which its threads and memory are bound; None binds none.

    Raises:
        CarryallError: ``Provider.runner`` raised it in a process.
        ProviderRuntimeError: a process ended.
    """

    def __init__(
        self,
        provider: str,
        models: Sequence[Path],
        configs: Sequence[RunnerConfig],
        nodes: Sequence[NumaNode] | None = None,
    ) -> None:
        self._provider = provider
        self._models = list(models)
        self._nodes = [None] * len(self._models) if nodes is None else list(nodes)
        # Functions cannot be pickled.
        self._configs = [dataclasses.replace(config, on_fallback=None) for config in configs]
        self.ranks: list[RunnerProcess] = []
        self._memory: RanksMemory | None = None
        self._filled = FilledSlots("a rank")
        self._closed = False
        infos = self._start()
        self._arrays = [0] * len(infos)
        self._state_arrays = [info.state_arrays for info in infos]
        first = infos[0]
        layouts = [info.kv_layout for info in infos]
        self.info: RunnerInfo = dataclasses.replace(
            first,
            vocab_size=sum(info.vocab_size for info in infos),
            kv_groups=tuple(group for info in infos for group in info.kv_groups),
            kv_layout=" | ".join(layouts) if all(layouts) else "",
            state_arrays=sum(info.state_arrays for info in infos),
            kv_tokens=min((info.kv_tokens for info in infos if info.kv_tokens is not None), default=None),
            top_logits=0,
            steps_ahead=0,
            max_loras=0,
            image_width=0,
        )

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV caches of all ranks as of their last answers, in bytes."""
        return sum(rank.kv_bytes for rank in self.ranks)

    def forward(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]:
        """Run one step; see ``Runner.forward``."""
        self._revive()
        self._filled.check(row.slot for row in rows if row.start)
        self._filled.add(*(row.slot for row in rows))  # also if a rank ends: what the slots hold is not known
        results = self._call("forward", list(rows))
        for row, states in zip(rows, results[0][1], strict=True):
            if row.last_hidden_states is not None:
                row.last_hidden_states[:] = states
        return [
            np.concatenate(parts, axis=-1) for parts in zip(*(logits for logits, _ in results), strict=True)
        ]

    def take_lost(self) -> set[int]:
        """Return the slots whose KV was lost since the last call, because a rank ended."""
        return self._filled.take_lost()

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self._filled.check([source])
        self._call("copy_prefix", source, target, length)
        self._filled.add(target)

    def release(self, slot: int) -> None:
        if slot in self._filled:
            self._call("release", slot)
            self._filled.discard(slot)

    def trim(self, slot: int, length: int) -> None:
        if slot in self._filled:
            self._call("trim", slot, length)

    def evict_kv(self, slot: int, length: int, eviction: KVEviction) -> None:
        """See ``Runner``. Each KV head chooses its own tokens, so ranks need not agree."""
        self._filled.check([slot])
        self._call("evict_kv", slot, length, eviction)

    def read_kv(self, slot: int, start: int, length: int) -> list[npt.NDArray[Any]]:
        """Return the KV of all ranks, one after another."""
        if length:
            self._filled.check([slot])
        parts = self._call("read_kv", slot, start, length)
        self._arrays = [len(own) for own in parts]
        return [array for own in parts for array in own]

    def write_kv(self, slot: int, start: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        """Write its own arrays to each rank."""
        if not all(self._arrays):
            self.read_kv(slot, 0, 0)
        if sum(self._arrays) != len(parts):
            raise ProviderRuntimeError(
                f"the KV has another layout: {len(parts)} arrays instead of {sum(self._arrays)}"
            )
        own = _cut(parts, self._arrays)
        self._each([("write_kv", slot, start, length, arrays) for arrays in own])
        self._filled.add(slot)

    def read_state(self, slot: int, length: int) -> list[npt.NDArray[Any]]:
        """Return the states of all ranks, one after another."""
        self._filled.check([slot])
        return [array for own in self._call("read_state", slot, length) for array in own]

    def write_state(self, slot: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        """Write its own arrays to each rank."""
        self._filled.check([slot])
        if len(parts) != self.info.state_arrays:
            raise ProviderRuntimeError(
                f"the state has another layout: {len(parts)} arrays instead of {self.info.state_arrays}"
            )
        self._each([("write_state", slot, length, own) for own in _cut(parts, self._state_arrays)])

    def close(self) -> None:
        """End all processes."""
        self._closed = True
        self._stop()

    def _call(self, *message: Any) -> list[Any]:
        return self._each([message] * len(self._models))

    def _revive(self) -> None:
        """Start all ranks if one has ended since the last call.

        Raises:
            ProviderRuntimeError: the runner is closed, or a rank ended at the start.
            CarryallError: a rank raised it.
        """
        if self._closed:
            raise ProviderRuntimeError("the runner is closed")
        ended = [index for index, rank in enumerate(self.ranks) if not rank.alive()]
        if ended:
            _log.warning("rank %d of %d has ended, all are started again", ended[0], len(self._models))
            self._stop()
        if not self.ranks:
            self._start()

    def _each(self, messages: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send a message to each rank and return their results; on errors see the class.

        Raises:
            ProviderRuntimeError: a rank ended, or did not answer.
            CarryallError: the ranks raised it.
        """
        self._revive()
        results, faults = self._exchange(messages)
        if not faults:
            return [results[rank] for rank in range(len(self.ranks))]
        rank = min(faults)
        healthy = len(faults) == len(self.ranks) and all(each.alive() for each in self.ranks)
        if not healthy or self._memory is None or not self._memory.in_step():
            ended = [index for index, each in enumerate(self.ranks) if not each.alive()]
            rank = ended[0] if ended else rank
            self._stop()
            _log.warning("rank %d of %d failed, all are started again: %s", rank, len(messages), faults[rank])
        raise _named(faults[rank], rank, len(messages))

    def _exchange(
        self, messages: Sequence[tuple[Any, ...]]
    ) -> tuple[dict[int, Any], dict[int, CarryallError]]:
        """Send a message to each rank; return results and faults by rank. Every rank has one of them."""
        results: dict[int, Any] = {}
        faults: dict[int, CarryallError] = {}
        with selectors.DefaultSelector() as waiting:
            for index, (rank, message) in enumerate(zip(self.ranks, messages, strict=True)):
                try:
                    rank.begin(*message)
                    waiting.register(rank.results, selectors.EVENT_READ, index)
                except ProviderRuntimeError as error:
                    faults[index] = error
            until = time.monotonic() + 2 * PATIENCE + _LAST_WORDS if not faults else self._last_words()
            while waiting.get_map():
                ready = waiting.select(max(0.0, until - time.monotonic()))
                for key, _ in ready:
                    waiting.unregister(key.fileobj)
                    try:
                        results[key.data] = self.ranks[key.data].end()
                    except CarryallError as error:
                        if not faults:
                            until = self._last_words()
                        faults[key.data] = error
                if not ready:
                    for key in list(waiting.get_map().values()):
                        waiting.unregister(key.fileobj)
                        self.ranks[key.data].kill()
                        faults[key.data] = ProviderRuntimeError("the rank does not answer; it was ended")
        return results, faults

    def _last_words(self) -> float:
        """Wake the ranks that wait for one that failed, if it ended; return until when they may answer."""
        if self._memory is not None and not all(rank.alive() for rank in self.ranks):
            self._memory.end()
            return time.monotonic() + _LAST_WORDS
        return time.monotonic() + PATIENCE + _LAST_WORDS

    def _start(self) -> list[RunnerInfo]:
        """Start all ranks together and return their facts."""
        self._memory = RanksMemory(len(self._models), PATIENCE)
        self.ranks = [RunnerProcess(self._memory.variables) for _ in self._models]
        try:
            messages = [
                (self._provider, model, config, node)
                for model, config, node in zip(self._models, self._configs, self._nodes, strict=True)
            ]
            results, faults = self._exchange(messages)
            if faults:
                rank = min(faults)
                raise _named(faults[rank], rank, len(messages))
            infos = [opened_info(results[rank], f"rank {rank}") for rank in range(len(self.ranks))]
            _check_alike(infos)
        except BaseException:
            self._stop()
            raise
        self._memory.unlink()
        return infos

    def _stop(self) -> None:
        """End all ranks; what slots held is lost."""
        self._filled.lose()
        if self._memory is not None:
            self._memory.end()
        for rank in self.ranks:
            with contextlib.suppress(ProviderRuntimeError):
                rank.close()
        self.ranks = []
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _check_alike(infos: Sequence[RunnerInfo]) -> None:
    """Check that ranks can be of one model.

    Raises:
        ProviderRuntimeError: they are of different ones.
    """
    for name in ("context_length", "max_slots", "num_tokens", "hidden_width", "state_arrays"):
        values = [getattr(info, name) for info in infos]
        if len(set(values)) > 1:
            told = ", ".join(map(str, values))
            raise ProviderRuntimeError(
                f"the ranks are of different models: {name} is {told}; clear the cache (carryall cache "
                "clear) and load the model again"
            )


def _cut(parts: Sequence[npt.NDArray[Any]], counts: Sequence[int]) -> list[list[npt.NDArray[Any]]]:
    """Return the arrays of each rank, given how many each has."""
    ends = np.cumsum(counts).tolist()
    return [list(parts[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def _named(fault: CarryallError, rank: int, count: int) -> CarryallError:
    named = CarryallError.__new__(type(fault))
    named.args = (f"rank {rank} of {count}: {fault}",)
    return named
