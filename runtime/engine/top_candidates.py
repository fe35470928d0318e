"""The most likely tokens of each row, in order, without sorting the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


@dataclass(slots=True)
class Candidates:
    """Per row, some most likely tokens, most likely first; equal logits in order of token id.

    Rows with fewer candidates than others are padded with logits of -inf.
    """

    token_ids: Integers  # [rows, width]
    logits: Logits  # [rows, width]


def top_candidates(logits: Logits, count: Integers) -> Candidates:
    """At least the ``count`` most likely tokens of each row.

    Args:
        logits: [rows, vocab_size], no NaN.
        count: [rows], each in [1, vocab_size].
    """
    return candidates_above(logits, _lower_bound(logits, count))


def candidates_above(logits: Logits, threshold: Logits) -> Candidates:
    """All tokens whose logit reaches the row's ``threshold`` [rows]."""
    rows, token_ids = np.nonzero(logits >= threshold[:, None])
    counts = np.bincount(rows, minlength=len(logits))
    column = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    width = int(counts.max())
    padded_ids = np.zeros((len(logits), width), np.int64)
    padded = np.full((len(logits), width), -np.inf, np.float32)
    padded_ids[rows, column] = token_ids
    padded[rows, column] = logits[rows, token_ids]
    order = np.argsort(-padded, axis=1, kind="stable")
    return Candidates(np.take_along_axis(padded_ids, order, 1), np.take_along_axis(padded, order, 1))


def _lower_bound(logits: Logits, count: Integers) -> Logits:
    """A value that at least ``count`` logits of each row reach, and few others.

    The k-th largest of disjoint blocks' maxima is such a value: k blocks hold one logit each that reaches it.
    """
    rows, vocab_size = logits.shape
    most = int(count.max())
    block = max(1, vocab_size // (8 * most))
    blocks = vocab_size // block
    maxima = logits[:, : blocks * block].reshape(rows, blocks, block).max(axis=2)
    maxima.sort(axis=1)
    return np.asarray(maxima[np.arange(rows), np.maximum(blocks - count, 0)], np.float32)
