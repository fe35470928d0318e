"""How far two runners of one model are apart."""

from __future__ import annotations

import numpy as np

from carryall.graph_opt.compare.runners import GraphRunner


def worst(first: GraphRunner, second: GraphRunner) -> float:
    """Largest difference of logits, of the largest: a prompt, single tokens, a piece on a cache."""
    rng, result = np.random.default_rng(0), 0.0
    for run in ({0: 5}, {1: 3}, {0: 1, 1: 1}, {1: 4}, {0: 1, 1: 1}):
        rows = {row: rng.integers(0, 256, count) for row, count in run.items()}
        left, right = first.forward(rows), second.forward(rows)
        for row in rows:
            result = max(result, float(np.abs(left[row] - right[row]).max() / np.abs(left[row]).max()))
    return result
