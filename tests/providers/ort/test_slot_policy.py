"""Splitting of steps: every token and slot exactly once, and no dummy row in a full slot."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall.providers.ort.slot_policy import SlotPolicy, powers_of_two

policies = st.builds(
    SlotPolicy,
    prefill_chunk=st.integers(1, 64),
    max_scores=st.integers(1, 5000),
    max_hole=st.integers(0, 3),
    max_rows=st.integers(1, 8),
    buckets=st.sampled_from([(), powers_of_two(4), powers_of_two(12), powers_of_two(100)]),
    prompts_on_cache=st.booleans(),
)


@given(policies, st.integers(0, 100), st.integers(1, 200))
def test_pieces_cover_the_tokens_in_order(policy: SlotPolicy, start: int, size: int) -> None:
    pieces = list(policy.pieces(start, size))
    assert [begin for begin, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
    assert pieces[-1][1] == size
    assert all(begin < end for begin, end in pieces)
    for begin, end in pieces:
        fresh = start + begin == 0
        if not policy.prompts_on_cache:
            assert end - begin == 1 or fresh
        else:
            scores = (end - begin) * (start + end)
            assert end - begin <= policy.prefill_chunk
            assert end - begin == 1 or scores <= policy.max_scores


@given(policies, st.lists(st.sampled_from(["row", "idle", "full"]), min_size=1, max_size=12))
def test_ranges_cover_the_rows_and_spare_full_slots(policy: SlotPolicy, kinds: list[str]) -> None:
    rows = [slot for slot, kind in enumerate(kinds) if kind == "row"]
    ranges = list(policy.ranges(rows, np.array([kind == "full" for kind in kinds])))
    run = [slot for first, count in ranges for slot in range(first, first + count)]
    assert len(run) == len(set(run))
    assert set(rows) <= set(run)
    assert not rows or max(run) < len(kinds)
    assert all(kinds[slot] != "full" for slot in run)
    for first, count in ranges:
        assert count <= policy.max_rows or (first == 0 and count in policy.buckets)


@pytest.mark.parametrize(
    ("slots", "sizes"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (32, (1, 2, 4, 8, 16, 32))]
)
def test_buckets(slots: int, sizes: tuple[int, ...]) -> None:
    assert powers_of_two(slots) == sizes
    policy = SlotPolicy(buckets=sizes, capture=True)
    assert policy.captures(0, sizes[-1])
    assert not policy.captures(1, sizes[0])
    assert not SlotPolicy(buckets=sizes).captures(0, sizes[-1])
    assert SlotPolicy(bank=4, capture=True).captures(8, 4)
    assert not SlotPolicy(bank=4).captures(8, 4)


@given(
    st.builds(
        SlotPolicy,
        joint_prompts=st.just(True),
        joint_tokens=st.integers(1, 60),
        max_padding=st.integers(0, 20),
    ),
    st.dictionaries(st.integers(0, 12), st.integers(2, 30)),
)
def test_joint_prompts_are_adjacent_and_waste_little(policy: SlotPolicy, sizes: dict[int, int]) -> None:
    prompts = sorted(sizes.items())
    groups = list(policy.adjacent(prompts))
    assert [index for group in groups for index in group] == list(range(len(prompts)))
    for group in groups:
        slots, tokens = zip(*(prompts[index] for index in group), strict=True)
        assert list(slots) == list(range(slots[0], slots[0] + len(slots)))
        if len(group) > 1:
            assert max(tokens) - min(tokens) <= policy.max_padding
            assert len(group) * max(tokens) <= policy.joint_tokens
    for one, other in itertools.pairwise(groups):  # no two groups could have been one
        slots, tokens = zip(*(prompts[index] for index in (*one, other[0])), strict=True)
        assert (
            slots[-1] != slots[-2] + 1
            or max(tokens) - min(tokens) > policy.max_padding
            or len(tokens) * max(tokens) > policy.joint_tokens
        )
