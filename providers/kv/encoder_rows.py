"""The keys and values of an encoder's rows, for cross-attention: computed once, and shared by slots.

A slot has the rows of one encoder output, all of them for as long as it holds tokens. Slots with the same
output share its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...errors import ProviderRuntimeError
from ...records import dataclass
from ..base import EncoderOutput, Row
from .block_pool import BlockTables


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """The inputs of a step for cross-attention.

    Args:
        states: [new rows, width], the encoder's rows whose keys and values are not in the cache.
        begins: int32 [rows + 1], where those of each row of the step begin.
        lengths: int32 [rows], the encoder's rows of each row of the step.
        table: int32 [rows, blocks], their blocks.
    """

    states: npt.NDArray[np.float32]
    begins: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    table: npt.NDArray[np.int32]


class EncoderRows:
    """Which encoder's rows each slot has, and in which blocks.

    Args:
        most: rows of the longest encoder output.
        width: elements of a row.
        block_size: rows of a block.
        slots: number of slots.
        row_bytes: bytes of a row's keys and values in all layers.
    """

    def __init__(self, most: int, width: int, block_size: int, slots: int, row_bytes: int) -> None:
        self.most, self._width, self._row_bytes = most, width, row_bytes
        self._blocks_each = -(-most // block_size)
        self._tables = BlockTables(slots * self._blocks_each, block_size, slots)
        self._keys: list[bytes | None] = [None] * slots
        self._begun: list[int] = []  # slots whose new rows a run has not written yet

    @property
    def num_blocks(self) -> int:
        """The number of blocks for all slots."""
        return self._tables.num_blocks

    @property
    def used_bytes(self) -> int:
        """Bytes of the used blocks; shared ones count once."""
        (free,) = self._tables.free_blocks
        return (self._tables.num_blocks - free) * self._tables.block_size * self._row_bytes

    def check(self, rows: Sequence[Row]) -> None:
        """Check that each row of a step has, or brings, the rows of an encoder.

        Raises:
            ProviderRuntimeError: one does not, or they do not fit the graph.
        """
        for row in rows:
            if row.start:
                if self._keys[row.slot] is None:
                    raise ProviderRuntimeError(f"slot {row.slot} holds no rows of an encoder")
                continue
            shape = None if row.encoder is None else row.encoder.states.shape
            if shape is None or len(shape) != 2 or shape[1] != self._width or not 1 <= shape[0] <= self.most:
                raise ProviderRuntimeError(
                    f"slot {row.slot} begins with an encoder output of shape {shape}; the graph takes 1 to "
                    f"{self.most} "
                    f"rows of {self._width}"
                )

    def begin(self, rows: Sequence[Row]) -> EncoderBatch:
        """Give the rows of a step their blocks; ``end`` follows when the run has written the new ones.

        Raises:
            ProviderRuntimeError: there are too few blocks.
        """
        for slot in self._begun:  # of a run that failed
            self.release(slot)
        self._begun = []
        states, begins = [np.empty((0, self._width), np.float32)], [0]
        for row in rows:
            new = self._placed(row.slot, row.encoder) if row.start == 0 and row.encoder is not None else None
            states += [] if new is None else [new]
            begins.append(begins[-1] + (0 if new is None else len(new)))
        (tables,) = self._tables.tables
        table = np.zeros((len(rows), self._blocks_each), np.int32)
        for place, row in enumerate(rows):
            table[place, : len(tables[row.slot])] = tables[row.slot]
        lengths = np.array([self._tables.lengths[row.slot] for row in rows], np.int32)
        return EncoderBatch(np.concatenate(states), np.array(begins, np.int32), lengths, table)

    def end(self) -> None:
        """Take note that the run has written the new rows."""
        self._begun = []

    def share(self, source: int, target: int) -> None:
        """Let slot ``target`` have the rows of slot ``source``."""
        self._tables.share(source, target, self._tables.lengths[source])
        self._keys[target] = self._keys[source]

    def release(self, slot: int) -> None:
        """Free the rows of a slot."""
        self._tables.truncate(slot, 0)
        self._keys[slot] = None

    def check_integrity(self) -> None:
        """Check the block tables; see ``BlockTables.check_integrity``."""
        self._tables.check_integrity()

    def _placed(self, slot: int, output: EncoderOutput) -> npt.NDArray[np.float32] | None:
        """Give a slot the rows of an output; return them, or None if a slot has them already."""
        if output.key in self._keys:
            holder = self._keys.index(output.key)
            if holder != slot:
                self.share(holder, slot)
                if holder in self._begun:
                    self._begun.append(slot)
            return None
        self.release(slot)
        self._tables.reserve([(slot, len(output.states))])
        self._tables.lengths[slot] = len(output.states)
        self._keys[slot] = output.key
        self._begun.append(slot)
        return output.states
