"""A request goes where its prompt is, unless that replica is flooded; a prefix of many requests is shared."""

from __future__ import annotations

import pytest

from carryall.runtime.cluster.bounded_loads import ranked


def order(ring: list[int], loads: list[int], held: dict[int, int]) -> list[int]:
    return ranked(ring, range(len(loads)), lambda each: held.get(each, 0), loads.__getitem__)


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([0, 0, 0], [0, 1, 2]),
        ([3, 0, 0], [0, 1, 2]),  # few requests share a step
        ([9, 8, 8], [0, 1, 2]),
        ([14, 5, 5], [1, 2, 0]),
        ([30, 20, 2], [1, 2, 0]),
    ],
)
def test_a_session_leaves_a_replica_that_has_far_more_than_others(
    loads: list[int], expected: list[int]
) -> None:
    assert order([0, 1, 2], loads, {}) == expected


def test_the_longest_beginning_comes_first_and_equal_ones_by_their_loads() -> None:
    assert order([0, 1], [1, 1, 1, 1], {3: 2, 2: 5}) == [2, 3, 0, 1]
    assert order([0, 1, 2], [3, 0, 2, 1], {0: 4, 2: 4, 3: 4}) == [3, 2, 0, 1]
    assert order([0, 1], [40, 0, 0, 0], {0: 9}) == [1, 0]  # to compute it again is better than to wait


@pytest.mark.parametrize("count", [1, 7, 8, 64, 400])
def test_a_flood_on_a_prefix_of_one_replica_is_shared(count: int) -> None:
    """As the front sees it: what was sent to a replica is held there from then on, and nothing ends."""
    loads, held = [0] * 8, {5: 8}
    computed = 0
    for _ in range(count):
        chosen = order([3, 1, 4, 0, 5, 2, 6, 7], loads, held)[0]
        computed += chosen not in held
        held[chosen] = 8
        loads[chosen] += 1
    assert max(loads) <= max(4, 1.5 * (count + 8) / 8)
    assert computed <= 7  # once for each other replica
    if count <= 4:
        assert loads[5] == count
    if count >= 64:
        used = [load for load in loads if load]
        assert max(used) - min(used) <= 1  # shared evenly by
        assert len(used) >= 6  # 8 / 1.5
