"""The inputs and results of decode runs on the host, indexed by slot: a run binds views of its slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import (
    HIDDEN_STATES,
    INPUT_IDS,
    LOGITS,
    LOGITS_POSITIONS,
    LOGSUMEXP,
    POSITION_IDS,
    SEQLENS_K,
    TOP_LOGITS,
    TOP_TOKEN_IDS,
    TOTAL_SEQUENCE_LENGTH,
)
from ..base import BestLogits, Row
from ..kv.decoder_graph import DecoderGraph

Array = npt.NDArray[Any]
Logits = npt.NDArray[np.float32]


class SlotArrays:
    """Arrays that live as long as the runner, so that a step only writes a few integers.

    Attributes:
        lengths: [slots], tokens in the cache; without change the ``seqlens_k`` of a decode run.
        total: the ``total_sequence_length`` of the next run, a scalar.
        positions: [slots, 1], position of each new token; None if the graph takes none.
        logits: [slots, 1, vocab].

    Args:
        graph: the inputs and outputs of the graph.
        slots: number of slots.
    """

    def __init__(self, graph: DecoderGraph, slots: int) -> None:
        self.lengths = np.zeros(slots, np.int32)
        self.total = np.zeros((), np.int32)
        self.positions = np.zeros((slots, 1), np.int64) if graph.takes_positions else None
        self.logits: Logits = np.empty((slots, 1, graph.vocab_size), np.float32)
        self._ids = np.zeros((slots, 1), np.int64)
        self._first_position = np.zeros((slots, 1), np.int64)
        width = graph.hidden_size
        self._hidden = None if width is None else np.zeros((slots, 1, width), np.float32)
        self._vocab_size, self._top_logits = graph.vocab_size, graph.top_logits
        self._best = _best_arrays(slots, 1, graph.top_logits)

    def write(self, rows: Iterable[Row]) -> None:
        """Write the token, and the hidden states if the graph takes them, of rows of one token."""
        for row in rows:
            self._ids[row.slot, 0] = row.tokens[0]
            if self._hidden is not None:
                self._hidden[row.slot] = row.hidden_states

    def feeds(self, first: int, count: int) -> dict[str, Array]:
        """Return the inputs of slots [first, first + count), as views."""
        part = slice(first, first + count)
        feeds: dict[str, Array] = {
            INPUT_IDS: self._ids[part],
            SEQLENS_K: self.lengths[part],
            TOTAL_SEQUENCE_LENGTH: self.total,
            LOGITS_POSITIONS: self._first_position[part],
        }
        if self.positions is not None:
            feeds[POSITION_IDS] = self.positions[part]
        if self._hidden is not None:
            feeds[HIDDEN_STATES] = self._hidden[part]
        return feeds

    def results(self, first: int, count: int) -> dict[str, Array]:
        """Return the arrays for the results of slots [first, first + count), as views."""
        part = slice(first, first + count)
        return {LOGITS: self.logits[part]} | {name: array[part] for name, array in self._best.items()}

    def best_results(self, first: int, count: int, wanted: int) -> Mapping[str, Array]:
        """Return the arrays for the largest logits of a run of prompts: for one position the slots' own."""
        if wanted == 1:
            return {name: array[first : first + count] for name, array in self._best.items()}
        return _best_arrays(count, wanted, self._top_logits)

    def best_of(self, slot: int, fetch: Callable[[], Logits]) -> BestLogits:
        """Return the slot's largest logits; ``fetch`` returns all of them."""
        return BestLogits(
            self._best[TOP_TOKEN_IDS][slot, 0],
            self._best[TOP_LOGITS][slot, 0],
            float(self._best[LOGSUMEXP][slot, 0]),
            self._vocab_size,
            fetch,
        )


def _best_arrays(rows: int, wanted: int, count: int) -> dict[str, Array]:
    """Return arrays for the outputs that ``TopLogitsPass`` adds; none if ``count`` is 0."""
    if not count:
        return {}
    return {
        TOP_LOGITS: np.empty((rows, wanted, count), np.float32),
        TOP_TOKEN_IDS: np.empty((rows, wanted, count), np.int64),
        LOGSUMEXP: np.empty((rows, wanted), np.float32),
    }
