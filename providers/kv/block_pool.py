"""Block tables of a paged KV cache (PagedAttention, arXiv:2309.06180, section 4), without the memory itself.

Slots share full blocks by reference. A shared block is copied before a slot writes into it (copy-on-write).
Each group of layers (``kv_groups``) has a pool and a table for each slot, so that it can free the blocks
behind its window while other groups keep theirs.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from ...errors import ProviderRuntimeError

FREED = -1  # in a table, in the place of a block behind a window, which no kernel reads any more
Copies = list[tuple[int, int, int]]  # (group, source, target) blocks that the caller must copy, in order


class BlockPool:
    """The blocks of one group of layers, and how many tables hold each.

    Args:
        num_blocks: number of blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.readers = [0] * num_blocks
        self.free = list(range(num_blocks))  # a heap: low blocks first, so that little memory is touched

    def take(self) -> int:
        """Return a free block, which then has one reader."""
        block = heapq.heappop(self.free)
        self.readers[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Count one reader more of each block."""
        for block in blocks:
            if block != FREED:
                self.readers[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Count one reader less of each block; blocks without readers are free."""
        for block in blocks:
            if block == FREED:
                continue
            self.readers[block] -= 1
            if not self.readers[block]:
                heapq.heappush(self.free, block)


class BlockTables:
    """The block tables of all slots. In all groups a slot has the same length.

    Args:
        num_blocks: number of blocks in the pool of each group.
        block_size: tokens per block.
        slots: number of slots.
        groups: number of groups.

    Attributes:
        lengths: tokens by slot, freed ones included.
        tables: blocks by group and slot; ``FREED`` in the place of freed ones.
    """

    def __init__(self, num_blocks: int, block_size: int, slots: int, groups: int = 1) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.lengths = [0] * slots
        self.tables: list[list[list[int]]] = [[[] for _ in range(slots)] for _ in range(groups)]
        self._pools = [BlockPool(num_blocks) for _ in range(groups)]

    @property
    def free_blocks(self) -> list[int]:
        """The number of free blocks of each group."""
        return [len(pool.free) for pool in self._pools]

    def of(self, slot: int) -> list[list[int]]:
        """Return the table of a slot in each group."""
        return [tables[slot] for tables in self.tables]

    def truncate(self, slot: int, length: int) -> None:
        """Drop the slot's tokens from ``length`` on."""
        kept = -(-length // self.block_size)
        for pool, tables in zip(self._pools, self.tables, strict=True):
            table = tables[slot]
            if len(table) > kept:
                pool.drop(table[kept:])
                del table[kept:]
        self.lengths[slot] = min(length, self.lengths[slot])

    def reserve(self, ends: Sequence[tuple[int, int]]) -> Copies:
        """Give each (slot, end) unshared blocks for positions [its length, end).

        Returns:
            The copies to make before writing.

        Raises:
            ProviderRuntimeError: a pool is exhausted; nothing was changed.
        """
        growing: list[tuple[int, int, int]] = []  # (group, slot, end) of tables that need other blocks
        for group, (pool, tables) in enumerate(zip(self._pools, self.tables, strict=True)):
            missing = 0
            for slot, end in ends:
                more = max(0, -(-end // self.block_size) - len(tables[slot]))
                # Whether the slot's next token goes into a block that others read.
                shared = self.lengths[slot] % self.block_size != 0 and pool.readers[tables[slot][-1]] > 1
                if more or shared:
                    missing += more + shared
                    growing.append((group, slot, end))
            if missing > len(pool.free):
                raise self._exhausted(group, missing)
        copies: Copies = []
        for group, slot, end in growing:
            pool, table = self._pools[group], self.tables[group][slot]
            if self.lengths[slot] % self.block_size and pool.readers[table[-1]] > 1:
                source, table[-1] = table[-1], pool.take()
                copies.append((group, source, table[-1]))
                pool.drop([source])
            while len(table) * self.block_size < end:
                table.append(pool.take())
        return copies

    def share(self, source: int, target: int, length: int) -> None:
        """Let ``target`` share the first ``length`` tokens of ``source``, which must hold them."""
        tables = [table[: -(-length // self.block_size)] for table in self.of(source)]
        for pool, table in zip(self._pools, tables, strict=True):
            pool.share(table)
        self.truncate(target, 0)
        for group, table in enumerate(tables):
            self.tables[group][target] = table
        self.lengths[target] = length

    def free_first(self, group: int, slot: int, tokens: int) -> None:
        """Free the slot's full blocks of the first ``tokens`` tokens in one group."""
        table = self.tables[group][slot]
        count = min(tokens // self.block_size, len(table))
        self._pools[group].drop(table[:count])
        table[:count] = [FREED] * count

    def replace(self, slot: int, length: int) -> list[list[int]]:
        """Replace the slot's blocks by unshared blocks for ``length`` tokens.

        Returns:
            The former blocks of each group. Their content stays readable until the next write; some may be
            reused as new blocks.

        Raises:
            ProviderRuntimeError: a pool is exhausted; nothing was changed.
        """
        old = [list(table) for table in self.of(slot)]
        for group, (pool, table) in enumerate(zip(self._pools, old, strict=True)):
            own = sum(pool.readers[block] == 1 for block in table if block != FREED)
            needed = -(-length // self.block_size) - own
            if needed > len(pool.free):
                raise self._exhausted(group, needed)
        self.truncate(slot, 0)
        self.reserve([(slot, length)])
        self.lengths[slot] = length
        return old

    def check_integrity(self) -> None:
        """Check that every block is either free, or in as many tables as its reader count says.

        Raises:
            ProviderRuntimeError: a block is not.
        """
        for pool, tables in zip(self._pools, self.tables, strict=True):
            held = Counter(block for table in tables for block in table if block != FREED)
            wrong = [block for block in range(self.num_blocks) if held[block] != pool.readers[block]]
            if wrong or sorted(pool.free) != [block for block in range(self.num_blocks) if not held[block]]:
                raise ProviderRuntimeError(
                    f"the block tables are corrupt: blocks {wrong} have wrong reader counts"
                )

    def _exhausted(self, group: int, blocks: int) -> ProviderRuntimeError:
        free = len(self._pools[group].free)
        return ProviderRuntimeError(
            f"the KV pool is exhausted: {blocks} more blocks of {self.block_size} tokens are needed, "
            f"{free} of {self.num_blocks} are free. Enlarge the pool or lower max_slots."
        )
