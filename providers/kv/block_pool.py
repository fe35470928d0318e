"""Block tables of a paged KV cache (PagedAttention, arXiv:2309.06180, section 4), without the memory itself.

Slots share full blocks by reference. A shared block is copied before a slot writes into it (copy-on-write).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from ...errors import ProviderRuntimeError

Copies = list[tuple[int, int]]  # (source, target) blocks that the caller must copy, in order


class BlockPool:
    """A pool of blocks, and the block table of each slot.

    Args:
        num_blocks: number of blocks in the pool.
        block_size: tokens per block.
        slots: number of slots.
    """

    def __init__(self, num_blocks: int, block_size: int, slots: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.lengths = [0] * slots
        self.tables: list[list[int]] = [[] for _ in range(slots)]
        self._readers = [0] * num_blocks
        self._free = list(range(num_blocks))  # a heap: low blocks first, so that little memory is touched

    @property
    def free_blocks(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    def truncate(self, slot: int, length: int) -> None:
        """Drop the slot's tokens from ``length`` on."""
        kept = -(-length // self.block_size)
        for block in self.tables[slot][kept:]:
            self._drop(block)
        del self.tables[slot][kept:]
        self.lengths[slot] = min(length, self.lengths[slot])

    def reserve(self, ends: Sequence[tuple[int, int]]) -> Copies:
        """Give each (slot, end) unshared blocks for positions [its length, end).

        Returns:
            The copies to make before writing.

        Raises:
            ProviderRuntimeError: the pool is exhausted; nothing was changed.
        """
        self._require(sum(self._missing(slot, end) for slot, end in ends))
        copies: Copies = []
        for slot, end in ends:
            table = self.tables[slot]
            if self._writes_shared(slot):
                source, table[-1] = table[-1], self._take()
                copies.append((source, table[-1]))
                self._drop(source)
            while len(table) * self.block_size < end:
                table.append(self._take())
        return copies

    def share(self, source: int, target: int, length: int) -> None:
        """Let ``target`` share the first ``length`` tokens of ``source``, which must hold them."""
        blocks = self.tables[source][: -(-length // self.block_size)]
        for block in blocks:
            self._readers[block] += 1
        self.truncate(target, 0)
        self.tables[target] = list(blocks)
        self.lengths[target] = length

    def drop_first(self, slot: int, count: int) -> None:
        """Drop the slot's first ``count`` blocks, which must be full."""
        for block in self.tables[slot][:count]:
            self._drop(block)
        del self.tables[slot][:count]
        self.lengths[slot] -= count * self.block_size

    def replace(self, slot: int, length: int) -> list[int]:
        """Replace the slot's blocks by unshared blocks for ``length`` tokens.

        Returns:
            The former blocks. Their content stays readable until the next write; some may be reused as new
            blocks.

        Raises:
            ProviderRuntimeError: the pool is exhausted; nothing was changed.
        """
        old = list(self.tables[slot])
        own = sum(self._readers[block] == 1 for block in old)
        self._require(-(-length // self.block_size) - own)
        self.truncate(slot, 0)
        self.reserve([(slot, length)])
        self.lengths[slot] = length
        return old

    def check_integrity(self) -> None:
        """Check that every block is either free, or in as many tables as its reader count says.

        Raises:
            ProviderRuntimeError: a block is not.
        """
        held = Counter(block for table in self.tables for block in table)
        wrong = [block for block in range(self.num_blocks) if held[block] != self._readers[block]]
        if wrong or sorted(self._free) != [block for block in range(self.num_blocks) if not held[block]]:
            raise ProviderRuntimeError(
                f"the block tables are corrupt: blocks {wrong} have wrong reader counts"
            )

    def _require(self, blocks: int) -> None:
        if blocks > self.free_blocks:
            raise ProviderRuntimeError(
                f"the KV pool is exhausted: {blocks} more blocks of {self.block_size} tokens are needed, "
                f"{self.free_blocks} of {self.num_blocks} are free. Enlarge the pool or lower max_slots."
            )

    def _missing(self, slot: int, end: int) -> int:
        return -(-end // self.block_size) - len(self.tables[slot]) + self._writes_shared(slot)

    def _writes_shared(self, slot: int) -> bool:
        """Whether the slot's next token goes into a shared block."""
        partial = self.lengths[slot] % self.block_size != 0
        return partial and self._readers[self.tables[slot][-1]] > 1

    def _take(self) -> int:
        block = heapq.heappop(self._free)
        self._readers[block] = 1
        return block

    def _drop(self, block: int) -> None:
        self._readers[block] -= 1
        if not self._readers[block]:
            heapq.heappush(self._free, block)
