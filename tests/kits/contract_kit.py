"""Sequences and reference logits for tests of the provider contract."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from carryall.providers.base import Row, Runner, RunnerInfo

Tokens = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]
SLOTS, CONTEXT, LOWERED, VOCAB = 4, 64, 640, 260


def sequence(length: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, VOCAB, length)


def whole(runner: Runner, tokens: Tokens, slot: int = 0) -> Logits:
    """Return the logits of every position from a single run."""
    (logits,) = runner.forward([Row(slot, tokens, 0, num_logits=len(tokens))])
    kept = logits.copy()
    runner.release(slot)
    return kept


def close_to(got: Logits, expected: Logits) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)


def window_bytes(info: RunnerInfo) -> int:
    """Bytes of a token in layers whose KV behind a window can be freed."""
    return sum(group.bytes_per_token for group in info.kv_groups if group.trim_step)
