"""The groups of layers: bytes, what is freed behind a length, and where a prefix can be resumed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall.providers.base import RunnerInfo
from carryall.providers.kv_groups import (
    FullKV,
    Held,
    KVGroup,
    StateKV,
    WindowKV,
    resume_point,
    widest,
    window_groups,
)


def test_sizes() -> None:
    groups = (FullKV(10), WindowKV(6, window=20, step=8), StateKV(state_bytes=100))
    assert [group.size(7) for group in groups] == [70, 42, 100]
    assert StateKV(state_bytes=100).size(0) == 0
    info = RunnerInfo(8, 64, 2, groups, batched_multi_token=True)
    assert (info.kv_bytes_per_token, info.sliding_window, info.trim_step) == (16, 20, 8)


@given(st.integers(1, 70), st.sampled_from([1, 8, 64]), st.integers(0, 300))
def test_what_a_window_frees_is_never_seen_again(window: int, step: int, length: int) -> None:
    freed = WindowKV(1, window, step).freed(length)
    first_seen = max(0, length - window + 1)  # by position ``length``, and later ones see later positions
    assert first_seen - step < freed <= first_seen
    assert freed % step == 0


def test_windows_without_a_step_free_nothing() -> None:
    (group,) = window_groups([(9, 4)], step=0)
    assert (group.freed(500), group.trim_step, group.reach) == (0, 0, 9)


def test_layers_are_grouped_by_window() -> None:
    assert window_groups([(0, 2), (9, 4), (0, 2), (9, 4)], 64) == (FullKV(4), WindowKV(8, 9, 64))
    assert [widest(windows) for windows in ([3, 9], [3, 0], [])] == [9, 0, 0]


@pytest.mark.parametrize(
    ("group", "length", "point"),
    [
        (FullKV(1), 40, 40),
        (FullKV(1), 90, 80),
        (WindowKV(1, 9, 8), 64, 64),
        (WindowKV(1, 9, 8), 63, 0),
        (StateKV(state_bytes=1), 90, 80),
        (StateKV(state_bytes=1), 79, 70),
        (StateKV(state_bytes=1), 29, 0),
    ],
)
def test_where_a_slot_is_resumed(group: KVGroup, length: int, point: int) -> None:
    assert group.resume_point(length, Held(80, trimmed=64, checkpoints=(30, 70))) == point


@given(st.integers(0, 99), st.integers(0, 99), st.lists(st.integers(0, 99), unique=True), st.integers(0, 99))
def test_windows_and_states_are_resumed_at_the_same_position(
    tokens: int, trimmed: int, checkpoints: list[int], length: int
) -> None:
    held = Held(tokens, trimmed, sorted(checkpoints))
    points = {point for point in (*checkpoints, tokens) if trimmed <= point <= min(length, tokens)}
    groups = (FullKV(1), WindowKV(1, 5, 8), StateKV(state_bytes=1))
    usable = [point for point in checkpoints if point <= tokens]
    found = resume_point(groups, length, Held(held.tokens, held.trimmed, sorted(usable)))
    assert found == max(points, default=0)
    assert all(group.resume_point(found, held) == found for group in groups)
