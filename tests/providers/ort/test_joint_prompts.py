"""Which rows share a run of prompts, and the inputs of such a run; ``test_device_memory.py`` runs them."""

from __future__ import annotations

import numpy as np

from carryall.providers.base import Row
from carryall.providers.ort.joint_prompts import can_join, joint_feeds


def tokens(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(count)


def test_rows_with_hidden_states_stay_alone() -> None:
    states = np.zeros((3, 8), np.float32)
    assert can_join(Row(0, tokens(3), 0))
    assert not can_join(Row(0, tokens(3), 0, hidden_states=states))
    assert not can_join(Row(0, tokens(3), 0, last_hidden_states=states))


def test_inputs_of_a_joint_run() -> None:
    feeds = joint_feeds(
        [Row(5, np.array([7, 8, 9]), 4, num_logits=2), Row(2, np.array([6, 5]), 0)], positions=True
    )
    expected = {
        "input_ids": [[7, 8, 9], [6, 5, 0]],
        "seqlens_k": [6, 2],
        "total_sequence_length": 7,
        "logits_positions": [[1, 2], [0, 1]],
        "position_ids": [[4, 5, 6], [0, 1, 2]],
    }
    assert {name: array.tolist() for name, array in feeds.items()} == expected
    assert "position_ids" not in joint_feeds([Row(0, np.array([1, 2]), 0)], positions=False)
