"""Allocation of KV slots."""

from __future__ import annotations

import pytest

from carryall.providers.kv_groups import FullKV, WindowKV
from carryall.runtime.engine.kv.slots import Copy, Release, SlotTable, Trim, Trimming
from carryall.runtime.engine.requests.chunk import Save


def test_lowest_free_slot_is_given_out_first() -> None:
    slots = SlotTable(4)
    assert [slots.allocate(1) for _ in range(3)] == [0, 1, 2]
    slots.free(1)
    slots.free(0)
    assert [slots.allocate(1), slots.allocate(1), slots.allocate(1)] == [0, 1, 3]
    assert slots.num_free == 0
    slots.check_integrity()


def test_budget_is_shared_by_all_slots_idle_ones_included() -> None:
    slots = SlotTable(4, max_tokens=10)
    first = slots.allocate(6)
    assert slots.fits(4)
    assert not slots.fits(5)
    slots.grow(first, 9)
    assert slots.used_tokens == 9
    slots.park(first, 8)
    assert (slots.used_tokens, slots.idle_tokens) == (0, 8)
    assert not slots.fits(3)
    slots.take_over(first, 5)
    assert (slots.used_tokens, slots.idle_tokens) == (5, 0)
    slots.free(first)
    assert slots.used_tokens == 0
    slots.check_integrity()


def test_idle_slots_are_listed_in_order_of_their_last_use() -> None:
    slots = SlotTable(4)
    for _ in range(3):
        slots.allocate(1)
    for slot in (2, 0, 1):
        slots.park(slot, 1)
    assert list(slots.idle) == [2, 0, 1]
    slots.touch(2)
    assert list(slots.idle) == [0, 1, 2]
    slots.evict(1)
    assert list(slots.idle) == [0, 2]
    assert slots.is_free(1)
    slots.check_integrity()


def test_operations_are_given_out_once_in_order() -> None:
    slots = SlotTable(3)
    a, b = slots.allocate(9), slots.allocate(1)
    slots.free(a)
    assert slots.allocate(1) == a
    slots.fork(b, a, 1)
    slots.park(b, 1)
    slots.evict(b)
    assert slots.take_operations() == [Release(a), Copy(b, a, 1), Release(b)]
    assert slots.take_operations() == []


def test_tokens_behind_windows_are_not_counted() -> None:
    slots = SlotTable(3, 100, Trimming(step=8, groups=(FullKV(4), WindowKV(4, 5, 8)), slack=8))
    slot = slots.allocate(50)
    assert slots.trimmable(slot, 24) == 4
    slots.trim(slot, 50)
    assert (slots.used_tokens, slots.shortest) == (50 - 16, {slot: 40})
    assert slots.trimmable(slot, 55) == 0
    other = slots.allocate(45)
    slots.fork(slot, other, 44)
    assert slots.used_tokens == 50 + 45 - 32
    slots.park(other, 45)
    slots.take_over(other, 60)
    assert (slots.used_tokens, slots.idle_tokens) == (50 + 60 - 32, 0)
    slots.free(slot)
    assert (slots.used_tokens, slots.shortest) == (44, {other: 40})
    slots.check_integrity()
    slots.save(other, [b"key"])
    slots.park(other, 60)
    slots.evict(other)
    assert not slots.shortest
    assert slots.take_operations() == [
        Trim(slot, 40),
        Copy(slot, other, 44),
        Release(slot),
        Save(other, (b"key",), 40),
        Release(other),
    ]
    slots.check_integrity()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda slots: slots._free.append(0), "do not contain each of"),
        (lambda slots: slots._free.pop(), "do not contain each of"),
        (
            lambda slots: setattr(slots, "used_tokens", 99),
            r"\(99, 2\) used and idle tokens, the slots hold \[5, 2\]",
        ),
        (lambda slots: setattr(slots, "max_tokens", 6), "hold 7 tokens, the budget is 6"),
    ],
)
def test_integrity_check_sees_damage(damage: object, words: str) -> None:
    slots = SlotTable(3, max_tokens=9)
    slots.allocate(5)
    slots.park(slots.allocate(4), 2)
    damage(slots)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=words):
        slots.check_integrity()
