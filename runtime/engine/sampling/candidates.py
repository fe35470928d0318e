"""The most likely tokens of rows of logits, found without sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ....records import dataclass

Row = npt.NDArray[np.float32]  # [vocab_size]
Logits = npt.NDArray[np.float32]  # [rows, ...]
Integers = npt.NDArray[np.int64]

# Rows are processed in groups of about this many logits, which fit into a core's cache.
GROUP_LOGITS = 2**18
_MIN_BLOCKS = 2048
_LOWEST = np.finfo(np.float32).min


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most likely tokens of each row, in descending order; equal logits are in order of token id.

    Rows with fewer candidates are padded with logits of -inf.
    """

    token_ids: Integers  # [rows, width]
    logits: Logits  # [rows, width]


@dataclass(frozen=True, slots=True)
class Shortlist:
    """Candidates of several rows, concatenated and not sorted: those of a row are in order of token id."""

    counts: Integers  # [rows]
    token_ids: Integers  # [all]
    logits: npt.NDArray[np.float32]  # [all]

    def of_rows(self, chosen: npt.NDArray[np.bool_]) -> Shortlist:
        """Return the candidates of the rows selected by a mask [rows]."""
        if chosen.all():
            return self
        kept = np.repeat(chosen, self.counts)
        return Shortlist(self.counts[chosen], self.token_ids[kept], self.logits[kept])


def top_candidates(rows: Sequence[Row], count: Integers) -> Candidates:
    """Return at least the ``count`` most likely tokens of each row, sorted, but none with a logit of -inf.

    Args:
        rows: logits [vocab_size] per row, without NaN.
        count: [rows], each in [1, vocab_size].
    """
    return in_order([shortlist_top(rows, count)])


def shortlist_top(rows: Sequence[Row], count: Integers) -> Shortlist:
    """Return at least the ``count`` [rows] most likely tokens of each row, but none with a logit of -inf."""
    return _joined([_top(logits, count[group]) for group, logits in _grouped(rows)])


def shortlist_above(rows: Sequence[Row], threshold: npt.NDArray[np.float32]) -> Shortlist:
    """Return all tokens whose logit is at least the row's ``threshold`` [rows]."""
    return _joined(
        [
            _at(logits, np.flatnonzero((logits >= threshold[group][:, None]).ravel()))
            for group, logits in _grouped(rows)
        ]
    )


def in_order(shortlists: Sequence[Shortlist]) -> Candidates:
    """Concatenate shortlists and sort the candidates of each row, the most likely first."""
    joined = _joined(shortlists)
    counts = joined.counts
    row = np.repeat(np.arange(len(counts)), counts)
    column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    token_ids = np.zeros((len(counts), int(counts.max())), np.int64)
    logits = np.full(token_ids.shape, -np.inf, np.float32)
    token_ids[row, column] = joined.token_ids
    logits[row, column] = joined.logits
    order = np.argsort(-logits, axis=1, kind="stable")
    return Candidates(np.take_along_axis(token_ids, order, 1), np.take_along_axis(logits, order, 1))


def _grouped(rows: Sequence[Row]) -> Iterator[tuple[slice, Logits]]:
    """Yield groups of rows: their slice, and their logits stacked [rows, vocab_size]."""
    step = max(1, GROUP_LOGITS // len(rows[0]))
    for start in range(0, len(rows), step):
        group = slice(start, start + step)
        yield group, rows[start][None] if step == 1 else np.stack(rows[group])


def _joined(shortlists: Sequence[Shortlist]) -> Shortlist:
    if len(shortlists) == 1:
        return shortlists[0]
    return Shortlist(
        np.concatenate([part.counts for part in shortlists]),
        np.concatenate([part.token_ids for part in shortlists]),
        np.concatenate([part.logits for part in shortlists]),
    )


def _at(logits: Logits, flat: Integers) -> Shortlist:
    row, token_ids = np.divmod(flat, logits.shape[1])
    return Shortlist(np.bincount(row, minlength=len(logits)), token_ids, logits.ravel()[flat])


def _top(logits: Logits, count: Integers) -> Shortlist:
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
    bound = np.maximum(bound, _LOWEST)
    row, block = np.nonzero(maxima >= bound[:, None])
    hit, place = np.nonzero(parts[row, :, block] >= bound[row, None])
    rest_row, rest = np.nonzero(logits[:, full:] >= bound[:, None])
    flat = row[hit] * vocab_size + place * blocks + block[hit]
    return _at(logits, np.sort(np.concatenate([flat, rest_row * vocab_size + full + rest])))
