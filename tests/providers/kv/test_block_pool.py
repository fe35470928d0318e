"""Block tables: sharing, copy-on-write, exhaustion; integrity after any sequence of calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall.errors import ProviderRuntimeError
from carryall.providers.kv.block_pool import BlockPool


def grow(pool: BlockPool, slot: int, end: int) -> list[tuple[int, int]]:
    copies = pool.reserve([(slot, end)])
    pool.lengths[slot] = end
    return copies


def test_full_blocks_are_shared_and_the_partial_one_is_copied_on_writing() -> None:
    pool = BlockPool(8, 4, 3)
    grow(pool, 0, 10)
    pool.share(0, 1, 10)
    assert pool.tables[1] == pool.tables[0]
    assert grow(pool, 1, 11) == [(pool.tables[0][2], pool.tables[1][2])]
    assert pool.tables[1][:2] == pool.tables[0][:2]
    assert grow(pool, 0, 11) == []
    pool.check_integrity()


def test_going_back_into_a_shared_block_copies_it() -> None:
    pool = BlockPool(8, 4, 2)
    grow(pool, 0, 8)
    pool.share(0, 1, 8)
    pool.truncate(0, 6)
    assert len(grow(pool, 0, 7)) == 1
    pool.check_integrity()


def test_exhaustion_changes_nothing() -> None:
    pool = BlockPool(3, 4, 2)
    grow(pool, 0, 8)
    with pytest.raises(ProviderRuntimeError, match="exhausted"):
        pool.reserve([(1, 4), (0, 9)])
    assert (pool.tables[1], pool.free_blocks) == ([], 1)
    pool.check_integrity()


def test_released_blocks_are_used_again() -> None:
    pool = BlockPool(2, 4, 2)
    grow(pool, 0, 8)
    pool.truncate(0, 0)
    grow(pool, 1, 8)
    assert pool.free_blocks == 0


def test_a_corrupt_table_is_found() -> None:
    pool = BlockPool(4, 4, 2)
    grow(pool, 0, 8)
    pool.tables[1].append(pool.tables[0][0])
    with pytest.raises(ProviderRuntimeError, match="corrupt"):
        pool.check_integrity()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["grow", "cut", "share", "replace", "drop"]),
            st.integers(0, 3),
            st.integers(0, 3),
            st.integers(1, 20),
        )
    )
)
def test_integrity_holds_and_no_slot_writes_into_anothers_tokens(
    steps: list[tuple[str, int, int, int]],
) -> None:
    """A simulated memory, written like a runner does, keeps the tokens of every slot."""
    pool = BlockPool(16, 4, 4)
    memory: dict[tuple[int, int], int] = {}
    expected: list[list[int]] = [[] for _ in range(4)]
    for count, (kind, slot, other, length) in enumerate(steps):
        if kind == "share" and slot != other and length <= len(expected[slot]):
            pool.truncate(other, 0)
            free = pool.free_blocks
            pool.share(slot, other, length)
            assert pool.free_blocks == free
            expected[other] = expected[slot][:length]
        elif kind == "cut" and length <= len(expected[slot]):
            pool.truncate(slot, length)
            del expected[slot][length:]
        elif kind == "drop":
            blocks = min(length, len(expected[slot]) // 4)
            pool.drop_first(slot, blocks)
            del expected[slot][: 4 * blocks]
        elif kind == "replace" and length <= len(expected[slot]):
            try:
                old = pool.replace(slot, length)
            except ProviderRuntimeError:
                assert pool.free_blocks < -(-length // 4)
                pool.check_integrity()
                continue
            rows = [memory[old[i // 4], i % 4] for i in range(len(expected[slot]))][-length:]
            memory |= {(pool.tables[slot][i // 4], i % 4): row for i, row in enumerate(rows)}
            expected[slot] = rows
        elif kind == "grow":
            start, end = len(expected[slot]), len(expected[slot]) + length
            try:
                copies = pool.reserve([(slot, end)])
            except ProviderRuntimeError:
                pool.check_integrity()
                continue
            assert len(copies) <= 1
            for source, target in copies:
                memory |= {(target, i): memory[source, i] for i in range(4) if (source, i) in memory}
            for position in range(start, end):
                memory[pool.tables[slot][position // 4], position % 4] = count
            expected[slot] += [count] * length
            pool.lengths[slot] = end
        pool.check_integrity()
        for held, table in zip(expected, pool.tables, strict=True):
            assert [memory[table[i // 4], i % 4] for i in range(len(held))] == held
    for slot in range(4):
        pool.truncate(slot, 0)
    assert pool.free_blocks == pool.num_blocks
