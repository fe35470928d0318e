"""Recurrent states on the host: those of all slots in one array for each layer and kind, written in place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ...errors import ProviderRuntimeError
from ..base import Row
from .block_pool import BlockPool
from .kv_memory import reserve


class StateMemory:
    """The states that slots keep, by the length of the text that each sums up.

    A slot has the newest state and those at its checkpoints. Slots share states by reference; a state that is
    kept or shared is copied before a run changes it.

    Args:
        shapes: shape of each state of a sequence, by name of the graph's input.
        places: number of states that fit.
        slots: number of slots.

    Attributes:
        arrays: [places, ...] float32 by name.

    Raises:
        ProviderRuntimeError: the address space cannot be reserved.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], places: int, slots: int) -> None:
        self.arrays: dict[str, npt.NDArray[np.float32]] = {}
        for name, shape in shapes.items():
            each = 4 * math.prod(shape)
            flat = np.frombuffer(reserve(name, places * each, each), np.float32)
            self.arrays[name] = flat.reshape(places, *shape)
        self._pool = BlockPool(places)
        self._kept: list[dict[int, int]] = [{} for _ in range(slots)]  # by slot, places by length

    @property
    def bytes_each(self) -> int:
        """Bytes of one state in all layers."""
        return sum(array[0].nbytes for array in self.arrays.values())

    @property
    def used(self) -> int:
        """The number of states that are held; shared ones count once."""
        return len(self._pool.readers) - len(self._pool.free)

    def check(self, rows: Sequence[Row]) -> None:
        """Check that there is a state where each row starts, and places for those that the rows will keep.

        Raises:
            ProviderRuntimeError: there is not.
        """
        for row in rows:
            if row.start and row.start not in self._kept[row.slot]:
                raise ProviderRuntimeError(f"slot {row.slot} has no state after {row.start} tokens")
        wanted = sum(1 + sum(length > row.start for length in row.checkpoints) for row in rows)
        if wanted > len(self._pool.free):
            raise ProviderRuntimeError(
                f"{wanted} more states are needed, {len(self._pool.free)} of "
                f"{len(self._pool.readers)} places are free; lower max_slots"
            )

    def begin(self, row: Row) -> int:
        """Return the place that a run of ``row`` changes; it has the state at the row's start.

        The slot loses all states but the row's earlier checkpoints, so that none is wrong if the run fails.
        """
        former = self._kept[row.slot]
        source = former.pop(row.start, None) if row.start else None
        kept = {n: place for n, place in former.items() if n < row.start and n in row.checkpoints}
        self._pool.drop(place for n, place in former.items() if n not in kept)
        self._kept[row.slot] = kept
        if source is not None and row.start in row.checkpoints:
            kept[row.start] = source
        elif source is not None and self._pool.readers[source] == 1:
            return source
        place = self._pool.take()
        for array in self.arrays.values():
            array[place] = 0 if source is None else array[source]
        if source is not None and row.start not in kept:
            self._pool.drop([source])
        return place

    def end(self, row: Row, place: int) -> None:
        """Keep what a run of ``row`` has left in a place of ``begin``."""
        self._kept[row.slot][row.start + len(row.tokens)] = place

    def share(self, source: int, target: int, length: int) -> None:
        """Let a slot hold the states of another after ``length`` and fewer tokens, and no others.

        Raises:
            ProviderRuntimeError: there is no state after ``length`` tokens.
        """
        if length and length not in self._kept[source]:
            raise ProviderRuntimeError(f"slot {source} has no state after {length} tokens")
        shared = {n: place for n, place in self._kept[source].items() if n <= length}
        self._pool.share(shared.values())
        self.release(target)
        self._kept[target] = shared

    @property
    def layout(self) -> str:
        """What ``read`` returns, for ``RunnerInfo.kv_layout``."""
        return "; ".join(f"{name} float32{list(array.shape[1:])}" for name, array in self.arrays.items())

    def read(self, slot: int, length: int) -> list[npt.NDArray[np.float32]]:
        """Return views of the state of a slot after ``length`` tokens.

        Raises:
            ProviderRuntimeError: there is no such state.
        """
        place = self._kept[slot].get(length)
        if place is None:
            raise ProviderRuntimeError(f"slot {slot} has no state after {length} tokens")
        return [array[place] for array in self.arrays.values()]

    def write(self, slot: int, length: int, parts: Sequence[npt.NDArray[np.float32]]) -> None:
        """Let a slot hold the result of ``read`` as its state after ``length`` tokens, beside its others.

        Raises:
            ProviderRuntimeError: it has other shapes, or no place is free.
        """
        arrays = list(self.arrays.values())
        facts = [(array.shape[1:], array.dtype) for array in arrays]
        if [(part.shape, part.dtype) for part in parts] != facts:
            raise ProviderRuntimeError(f"the state has another layout than {self.layout}")
        self._pool.drop([place] if (place := self._kept[slot].pop(length, None)) is not None else [])
        if not self._pool.free:
            raise ProviderRuntimeError(f"no place is free for the state of slot {slot}; lower max_slots")
        place = self._kept[slot][length] = self._pool.take()
        for array, part in zip(arrays, parts, strict=True):
            array[place] = part

    def release(self, slot: int) -> None:
        """Drop the states of a slot."""
        self._pool.drop(self._kept[slot].values())
        self._kept[slot] = {}

    def check_integrity(self) -> None:
        """Check that the number of slots that hold each state is what its reader count says.

        Raises:
            ProviderRuntimeError: it is not.
        """
        held = [place for kept in self._kept for place in kept.values()]
        if [held.count(place) for place in range(len(self._pool.readers))] != self._pool.readers:
            raise ProviderRuntimeError("the states have wrong reader counts")
