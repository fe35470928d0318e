"""The books of KV slots."""

from __future__ import annotations

import pytest

from carryall.runtime.engine.slots import SlotTable


def test_lowest_free_slot_is_given_out_first() -> None:
    slots = SlotTable(4)
    assert [slots.allocate(1) for _ in range(3)] == [0, 1, 2]
    slots.free(1)
    slots.free(0)
    assert [slots.allocate(1), slots.allocate(1), slots.allocate(1)] == [0, 1, 3]
    assert not slots.can_allocate(1)
    slots.check_integrity()


def test_budget_is_shared_by_all_slots() -> None:
    slots = SlotTable(4, max_tokens=10)
    first = slots.allocate(6)
    assert slots.can_allocate(4)
    assert not slots.can_allocate(5)
    assert slots.can_grow(first, 10)
    assert not slots.can_grow(first, 11)
    slots.grow(first, 9)
    assert slots.used_tokens == 9
    slots.free(first)
    assert slots.used_tokens == 0
    slots.check_integrity()


def test_freed_slots_are_reported_once_and_not_if_in_use_again() -> None:
    slots = SlotTable(3)
    a, b = slots.allocate(1), slots.allocate(1)
    slots.free(a)
    slots.free(b)
    assert slots.allocate(1) == a
    assert slots.take_freed() == [b]
    assert slots.take_freed() == []


def test_moving_the_highest_slot_fills_the_lowest_hole() -> None:
    slots = SlotTable(4)
    for tokens in (1, 2, 3):
        slots.allocate(tokens)
    assert slots.lowest_hole() is None
    slots.free(0)
    assert slots.lowest_hole() == 0
    assert slots.move_highest() == (2, 0)
    assert slots.tokens(0) == 3
    assert slots.take_freed() == [2]
    assert slots.lowest_hole() is None
    slots.check_integrity()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda slots: slots._free.append(0), "not all slots once"),
        (lambda slots: slots._free.pop(), "not all slots once"),
        (lambda slots: setattr(slots, "used_tokens", 99), "99 tokens counted, 5 held"),
        (lambda slots: setattr(slots, "max_tokens", 4), "more than the budget of 4"),
    ],
)
def test_integrity_check_sees_damage(damage: object, words: str) -> None:
    slots = SlotTable(3, max_tokens=9)
    slots.allocate(5)
    damage(slots)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=words):
        slots.check_integrity()
