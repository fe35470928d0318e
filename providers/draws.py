"""How a device is told to draw tokens: the input ``draw`` of graphs with ``DrawTokensPass``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..contract import DRAW_COLUMNS
from .base import Draw

_GREEDY, _NO_LIMIT = (1.0, 1.0, 2.0, 0.0, 0.0), 1e9


def controls_of(draws: Sequence[Draw | None], count: int) -> npt.NDArray[np.float32]:
    """Return how a device draws tokens, [count, columns of ``DRAW_COLUMNS``].

    Args:
        draws: at most ``count``; None, and those that lack, draw any token.
        count: number of tokens that are drawn.
    """
    # Rounding of sums must not drop what no limit is set for.
    columns = [
        _GREEDY
        if draw is None or draw.temperature == 0
        else (
            1 / draw.temperature,
            draw.top_k or _NO_LIMIT,
            draw.top_p if draw.top_p < 1 else 2.0,
            draw.min_p,
            draw.uniform,
        )
        for draw in [*draws, *[None] * (count - len(draws))]
    ]
    return np.array(columns, np.float32).reshape(count, len(DRAW_COLUMNS))
