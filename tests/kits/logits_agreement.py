"""Compare the logits of two runners of one model."""

from __future__ import annotations

import numpy as np

from carryall.graph_opt.compare.runners import GraphRunner


def worst(first: GraphRunner, second: GraphRunner) -> float:
    """Return the largest difference of logits relative to the largest logit: prompt, single tokens, piece."""
    rng, result = np.random.default_rng(0), 0.0
    for run in ({0: 5}, {1: 3}, {0: 1, 1: 1}, {1: 4}, {0: 1, 1: 1}):
        rows = {row: rng.integers(0, 256, count) for row, count in run.items()}
        left, right = first.forward(rows), second.forward(rows)
        for row in rows:
            result = max(result, float(np.abs(left[row] - right[row]).max() / np.abs(left[row]).max()))
    return result
