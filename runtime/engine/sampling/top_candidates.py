"""Find the most likely tokens of each row without sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]  # [vocab_size]
Logits = npt.NDArray[np.float32]  # [rows, ...]
Integers = npt.NDArray[np.int64]

# Rows are processed in groups of about this many logits, which fit into a core's cache.
GROUP_LOGITS = 2**18
_MIN_BLOCKS = 2048


@dataclass(slots=True)
class Candidates:
    """The most likely tokens of each row, in descending order; equal logits are in order of token id.

    Rows with fewer candidates are padded with logits of -inf.
    """

    token_ids: Integers  # [rows, width]
    logits: Logits  # [rows, width]


@dataclass(slots=True)
class Found:
    """Candidates of several rows, concatenated; those of a row are in order of token id."""

    counts: Integers  # [rows]
    token_ids: Integers  # [all]
    logits: npt.NDArray[np.float32]  # [all]

    def those(self, chosen: npt.NDArray[np.bool_]) -> Found:
        """Return the candidates of the rows selected by a mask [rows]."""
        if chosen.all():
            return self
        own = np.repeat(chosen, self.counts)
        return Found(self.counts[chosen], self.token_ids[own], self.logits[own])


def top_candidates(rows: Sequence[Row], count: Integers) -> Candidates:
    """Return at least the ``count`` most likely tokens of each row, sorted.

    Args:
        rows: logits [vocab_size] per row, without NaN.
        count: [rows], each in [1, vocab_size].
    """
    return in_order([find_top(rows, count)])


def find_top(rows: Sequence[Row], count: Integers) -> Found:
    """Return at least the ``count`` [rows] most likely tokens of each row, not sorted by logit."""
    return _joined([_top(logits, count[own]) for own, logits in _grouped(rows)])


def find_above(rows: Sequence[Row], threshold: npt.NDArray[np.float32]) -> Found:
    """Return all tokens whose logit is at least the row's ``threshold`` [rows]."""
    return _joined([_above(logits, threshold[own]) for own, logits in _grouped(rows)])


def in_order(found: Sequence[Found]) -> Candidates:
    """Concatenate candidates and sort those of each row, the most likely first."""
    all_found = _joined(found)
    counts = all_found.counts
    row = np.repeat(np.arange(len(counts)), counts)
    column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    token_ids = np.zeros((len(counts), int(counts.max())), np.int64)
    logits = np.full(token_ids.shape, -np.inf, np.float32)
    token_ids[row, column] = all_found.token_ids
    logits[row, column] = all_found.logits
    order = np.argsort(-logits, axis=1, kind="stable")
    return Candidates(np.take_along_axis(token_ids, order, 1), np.take_along_axis(logits, order, 1))


def _grouped(rows: Sequence[Row]) -> Iterator[tuple[slice, Logits]]:
    """Yield groups of rows: their slice, and their logits stacked [rows, vocab_size]."""
    step = max(1, GROUP_LOGITS // len(rows[0]))
    for start in range(0, len(rows), step):
        chosen = slice(start, start + step)
        yield chosen, rows[start][None] if step == 1 else np.stack(rows[chosen])


def _joined(found: Sequence[Found]) -> Found:
    if len(found) == 1:
        return found[0]
    return Found(
        np.concatenate([part.counts for part in found]),
        np.concatenate([part.token_ids for part in found]),
        np.concatenate([part.logits for part in found]),
    )


def _above(logits: Logits, threshold: npt.NDArray[np.float32]) -> Found:
    return _at(logits, np.flatnonzero((logits >= threshold[:, None]).ravel()))


def _at(logits: Logits, flat: Integers) -> Found:
    row, token_ids = np.divmod(flat, logits.shape[1])
    return Found(np.bincount(row, minlength=len(logits)), token_ids, logits.ravel()[flat])


def _top(logits: Logits, count: Integers) -> Found:
    """Return the tokens whose logit reaches a bound that at least ``count`` logits of the row reach.

    The bound is the k-th largest maximum of disjoint blocks: k blocks have a logit that reaches it, and only
    these blocks are read again. The logits of a block are strided, so that maxima of all blocks vectorize.
    """
    rows, vocab_size = logits.shape
    size = max(1, vocab_size // max(8 * int(count.max()), _MIN_BLOCKS))
    blocks = vocab_size // size
    full = blocks * size
    parts = logits[:, :full].reshape(rows, size, blocks)
    maxima = parts.max(axis=1)
    bound = np.sort(maxima, axis=1)[np.arange(rows), np.maximum(blocks - count, 0)]
    row, block = np.nonzero(maxima >= bound[:, None])
    reaches = parts[row, :, block] >= bound[row, None]
    found, place = np.nonzero(reaches)
    rest_row, rest = np.nonzero(logits[:, full:] >= bound[:, None])
    flat = row[found] * vocab_size + place * blocks + block[found]
    return _at(logits, np.sort(np.concatenate([flat, rest_row * vocab_size + full + rest])))
