"""The inputs of a step for rows with pictures: what replaces the embeddings of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .base import Row


def image_inputs(rows: Sequence[Row], width: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return ``image_states`` [states, width], and ``image_rows`` [tokens] of all rows one behind the other.

    The last state is zeros, which tokens of text look up and do not use. Tokens behind the ``image_rows``
    of a row, such as proposed ones, are text.
    """
    states, places, known = [], [], 0
    for row in rows:
        place = np.full(len(row.tokens), -1, np.int64)
        if row.image_states is not None and row.image_rows is not None:
            given = row.image_rows
            place[: len(given)] = np.where(given >= 0, given + known, -1)
            states.append(row.image_states)
            known += len(row.image_states)
        places.append(place)
    states.append(np.zeros((1, width), np.float32))
    return np.concatenate(states), np.concatenate(places)


def image_ahead(rows: Sequence[Row]) -> npt.NDArray[np.int32]:
    """Return ``image_ahead`` [tokens] of all rows one behind the other; 0 for text."""
    ahead = np.zeros(sum(len(row.tokens) for row in rows), np.int32)
    first = 0
    for row in rows:
        if row.image_ahead is not None:
            ahead[first : first + len(row.image_ahead)] = row.image_ahead
        first += len(row.tokens)
    return ahead


def rope_positions(rows: Sequence[Row], starts: Sequence[int], axes: int) -> npt.NDArray[np.int64]:
    """Return ``rope_positions`` [axes, tokens] of all rows one behind the other.

    Args:
        rows: rows, with positions or without.
        starts: the position in the text of the first token of each row.
        axes: number of axes.
    """
    parts = []
    for row, start in zip(rows, starts, strict=True):
        count, positions = len(row.tokens), row.rope_positions
        if positions is None:
            parts.append(np.broadcast_to(np.arange(start, start + count, dtype=np.int64), (axes, count)))
            continue
        behind = positions[:, -1].max() + np.arange(1, count - positions.shape[1] + 1)
        parts += [positions, np.broadcast_to(behind, (axes, len(behind)))]
    return np.concatenate(parts, axis=1)
