"""Block tables: sharing, copy-on-write, freeing by group, exhaustion; integrity after any calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall.errors import ProviderRuntimeError
from carryall.providers.kv.block_pool import FREED, BlockTables, Copies


def grow(tables: BlockTables, slot: int, end: int) -> Copies:
    copies = tables.reserve([(slot, end)])
    tables.lengths[slot] = end
    return copies


def test_full_blocks_are_shared_and_the_partial_one_is_copied_on_writing() -> None:
    tables = BlockTables(8, 4, 3)
    grow(tables, 0, 10)
    tables.share(0, 1, 10)
    (first, second, _) = tables.tables[0]
    assert second == first
    assert grow(tables, 1, 11) == [(0, tables.tables[0][0][2], tables.tables[0][1][2])]
    assert tables.tables[0][1][:2] == tables.tables[0][0][:2]
    assert grow(tables, 0, 11) == []
    tables.check_integrity()


def test_going_back_into_a_shared_block_copies_it() -> None:
    tables = BlockTables(8, 4, 2)
    grow(tables, 0, 8)
    tables.share(0, 1, 8)
    tables.truncate(0, 6)
    assert len(grow(tables, 0, 7)) == 1
    tables.check_integrity()


def test_exhaustion_changes_nothing() -> None:
    tables = BlockTables(3, 4, 2, groups=2)
    grow(tables, 0, 8)
    with pytest.raises(ProviderRuntimeError, match="exhausted"):
        tables.reserve([(1, 4), (0, 9)])
    assert (tables.of(1), tables.free_blocks) == ([[], []], [1, 1])
    tables.check_integrity()


def test_released_blocks_are_used_again() -> None:
    tables = BlockTables(2, 4, 2)
    grow(tables, 0, 8)
    tables.truncate(0, 0)
    grow(tables, 1, 8)
    assert tables.free_blocks == [0]


def test_a_group_frees_what_others_keep() -> None:
    tables = BlockTables(4, 4, 3, groups=2)
    grow(tables, 0, 14)
    tables.share(0, 1, 14)
    tables.free_first(1, 0, 11)
    assert tables.free_blocks == [0, 0]  # the other slot still reads them
    tables.free_first(1, 1, 11)
    assert tables.free_blocks == [0, 2]
    assert tables.tables[1][1] == [FREED, FREED, *tables.tables[1][0][2:]]
    assert FREED not in tables.tables[0][0]
    tables.share(1, 2, 14)
    tables.check_integrity()
    for slot in range(3):
        tables.truncate(slot, 0)
    assert tables.free_blocks == [4, 4]


def test_a_corrupt_table_is_found() -> None:
    tables = BlockTables(4, 4, 2)
    grow(tables, 0, 8)
    tables.tables[0][1].append(tables.tables[0][0][0])
    with pytest.raises(ProviderRuntimeError, match="corrupt"):
        tables.check_integrity()


class Memory:
    """The tables of two groups and a simulated memory that is written as a runner does it."""

    def __init__(self) -> None:
        self.tables = BlockTables(16, 4, 4, groups=2)
        self.cells: dict[tuple[int, int, int], int] = {}  # group, block, row
        self.expected: list[list[int]] = [[] for _ in range(4)]

    def row(self, group: int, slot: int, position: int) -> int | None:
        """What a kernel reads; None if it was freed."""
        block = self.tables.tables[group][slot][position // 4]
        return None if block == FREED else self.cells[group, block, position % 4]

    def write(self, slot: int, position: int, value: int) -> None:
        for group, table in enumerate(self.tables.of(slot)):
            self.cells[group, table[position // 4], position % 4] = value

    def grow(self, slot: int, length: int, value: int) -> None:
        start = len(self.expected[slot])
        copies = self.tables.reserve([(slot, start + length)])
        assert len(copies) <= 2
        for group, source, target in copies:
            for i in range(4):
                if (group, source, i) in self.cells:
                    self.cells[group, target, i] = self.cells[group, source, i]
        for position in range(start, start + length):
            self.write(slot, position, value)
        self.expected[slot] += [value] * length
        self.tables.lengths[slot] = start + length

    def replace(self, slot: int, length: int) -> None:
        held = len(self.expected[slot])
        kept = [[self.row(group, slot, i) or 0 for i in range(held)][-length:] for group in range(2)]
        self.tables.replace(slot, length)
        for i in range(length):
            for group, table in enumerate(self.tables.of(slot)):
                self.cells[group, table[i // 4], i % 4] = kept[group][i]
        self.expected[slot] = self.expected[slot][-length:]

    def check(self, freed: dict[int, int]) -> None:
        """Compare every row with what was written; ``freed`` rows of group 1 may be gone, others not."""
        self.tables.check_integrity()
        for slot, held in enumerate(self.expected):
            assert [self.row(0, slot, i) for i in range(len(held))] == held
            first = freed.get(slot, 0)
            assert [self.row(1, slot, i) for i in range(first, len(held))] == held[first:]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["grow", "cut", "share", "replace", "free"]),
            st.integers(0, 3),
            st.integers(0, 3),
            st.integers(1, 20),
        )
    )
)
def test_integrity_holds_and_no_slot_writes_into_anothers_tokens(
    steps: list[tuple[str, int, int, int]],
) -> None:
    """A simulated memory keeps the tokens of every slot in both groups, but those that one group freed."""
    memory, freed = Memory(), dict[int, int]()
    tables, expected = memory.tables, memory.expected
    for count, (kind, slot, other, length) in enumerate(steps, start=1):
        fits = freed.get(slot, 0) < length <= len(expected[slot])
        try:
            if kind == "share" and slot != other and fits:
                tables.truncate(other, 0)
                free = tables.free_blocks
                tables.share(slot, other, length)
                assert tables.free_blocks == free
                expected[other], freed[other] = expected[slot][:length], freed.get(slot, 0)
            elif kind == "cut" and fits:
                tables.truncate(slot, length)
                del expected[slot][length:]
            elif kind == "free" and fits:
                tables.free_first(1, slot, length - 1)
                freed[slot] = max(freed.get(slot, 0), (length - 1) // 4 * 4)
            elif kind == "replace" and fits and not freed.get(slot):
                memory.replace(slot, length)
            elif kind == "grow":
                memory.grow(slot, length, count)
        except ProviderRuntimeError:
            assert min(tables.free_blocks) < -(-length // 4) + 1
        memory.check(freed)
    for slot in range(4):
        tables.truncate(slot, 0)
    assert tables.free_blocks == [16, 16]
