"""The most likely tokens of each row, in order, without sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]  # [vocab_size]
Logits = npt.NDArray[np.float32]  # [rows, ...]
Integers = npt.NDArray[np.int64]

# Rows are stacked in groups of about this many logits, which fit into a core's own cache.
_GROUP_LOGITS = 2**18
_LEAST_BLOCKS = 512


@dataclass(slots=True)
class Candidates:
    """Per row, some most likely tokens, most likely first; equal logits in order of token id.

    Rows with fewer candidates than others are padded with logits of -inf.
    """

    token_ids: Integers  # [rows, width]
    logits: Logits  # [rows, width]


def grouped(rows: Sequence[Row]) -> Iterator[tuple[slice, Logits]]:
    """Yield ever more rows, stacked: which they are, and their logits."""
    step = max(1, _GROUP_LOGITS // len(rows[0])) if rows else 1
    for start in range(0, len(rows), step):
        chosen = slice(start, start + step)
        yield chosen, rows[start][None] if step == 1 else np.stack(rows[chosen])


def top_candidates(rows: Sequence[Row], count: Integers) -> Candidates:
    """At least the ``count`` most likely tokens of each row.

    Args:
        rows: per row, logits [vocab_size] without NaN.
        count: [rows], each in [1, vocab_size].
    """
    found = [_at_least(logits, _lower_bound(logits, count[chosen])) for chosen, logits in grouped(rows)]
    return _sorted(found)


def candidates_above(rows: Sequence[Row], threshold: npt.NDArray[np.float32]) -> Candidates:
    """All tokens whose logit reaches the row's ``threshold`` [rows]."""
    return _sorted([_at_least(logits, threshold[chosen]) for chosen, logits in grouped(rows)])


@dataclass(slots=True)
class _Found:
    """Candidates of some rows, one row after the other."""

    counts: Integers  # [rows]
    token_ids: Integers  # [all]
    logits: npt.NDArray[np.float32]  # [all]


def _at_least(logits: Logits, threshold: npt.NDArray[np.float32]) -> _Found:
    flat = np.flatnonzero((logits >= threshold[:, None]).ravel())
    row, token_ids = np.divmod(flat, logits.shape[1])
    return _Found(np.bincount(row, minlength=len(logits)), token_ids, logits.ravel()[flat])


def _sorted(found: Sequence[_Found]) -> Candidates:
    counts = np.concatenate([part.counts for part in found])
    row = np.repeat(np.arange(len(counts)), counts)
    column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    token_ids = np.zeros((len(counts), int(counts.max())), np.int64)
    logits = np.full(token_ids.shape, -np.inf, np.float32)
    token_ids[row, column] = np.concatenate([part.token_ids for part in found])
    logits[row, column] = np.concatenate([part.logits for part in found])
    order = np.argsort(-logits, axis=1, kind="stable")
    return Candidates(np.take_along_axis(token_ids, order, 1), np.take_along_axis(logits, order, 1))


def _lower_bound(logits: Logits, count: Integers) -> npt.NDArray[np.float32]:
    """A value that at least ``count`` logits of each row reach, and few others.

    The k-th largest of disjoint blocks' maxima is such a value: k blocks hold one logit each that reaches it.
    A block's logits lie far apart, so that the maxima of all blocks come from whole vectors.
    """
    rows, vocab_size = logits.shape
    block = max(1, vocab_size // max(8 * int(count.max()), _LEAST_BLOCKS))
    blocks = vocab_size // block
    maxima = logits[:, : blocks * block].reshape(rows, block, blocks).max(axis=1)
    maxima.sort(axis=1)
    bound: npt.NDArray[np.float32] = maxima[np.arange(rows), np.maximum(blocks - count, 0)]
    return bound
