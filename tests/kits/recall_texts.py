"""Texts for a tiny network that recalls: pairs of a key and a value, other tokens, then a key."""

from __future__ import annotations

import numpy as np

BOS, EOS = 0, 1
KEYS, VALUES, OTHERS = range(2, 18), range(18, 34), range(34, 48)
VOCABULARY = 48


def recall_text(seed: int, pairs: int, between: int) -> tuple[list[int], dict[int, int]]:
    """Return a text up to the first question, and the value of each key in it."""
    rng = np.random.default_rng(seed)
    keys = rng.permutation(KEYS)[:pairs].tolist()
    values = dict(zip(keys, rng.integers(VALUES.start, VALUES.stop, pairs).tolist(), strict=True))
    told = [token for pair in values.items() for token in pair]
    return [BOS, *told, *rng.integers(OTHERS.start, OTHERS.stop, between).tolist()], values
