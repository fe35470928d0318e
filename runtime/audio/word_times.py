"""Times of words: the weights of cross-attention are warped to a path through tokens and time.

The method is that of Whisper's own code (https://github.com/openai/whisper, ``timing.py``), with dynamic time
warping (Sakoe and Chiba, https://doi.org/10.1109/TASSP.1978.1163055).
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ...records import dataclass

Floats = npt.NDArray[np.float32]

# Tokens [n] and rows [rows, width] that they attend to -> weights of the alignment heads [heads, n, rows].
Alignment = Callable[[Sequence[int], Floats], Floats]

_FILTER = 7  # rows of the encoder that a median is taken of
# In languages without spaces, each character is a word.
_WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
_BEFORE, _BEHIND = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001 -- marks of other scripts


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word of a transcript.

    Args:
        text: with the space before it, and the marks around it.
        start: in seconds from the beginning of the recording.
        end: see there.
    """

    text: str
    start: float
    end: float


def token_ends(weights: Floats) -> npt.NDArray[np.int64]:
    """Return the row of an encoder at which each token ends, [tokens]; they never fall.

    Args:
        weights: [heads, tokens, rows] of the alignment heads, at least one row.
    """
    deviation = weights.std(axis=1, keepdims=True)
    deviation[deviation == 0] = 1  # a single token, or rows that no token prefers
    normed = (weights - weights.mean(axis=1, keepdims=True)) / deviation
    return warped(-_filtered(normed).mean(axis=0))


def _filtered(values: Floats) -> Floats:
    """Return the median of each value and its neighbours along the last axis, reflected at its ends."""
    half = _FILTER // 2
    if values.shape[-1] <= half:
        return values
    wide = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(half, half)], mode="reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(wide, _FILTER, axis=-1), axis=-1)


def warped(costs: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
    """Return the row at which the cheapest path through ``costs`` [tokens, rows] enters each token.

    A path goes from the first place to the last, by steps to the next token, the next row or both. Costs are
    computed along diagonals, whose places do not depend on each other.
    """
    tokens, rows = costs.shape
    total = np.full((tokens + 1, rows + 1), np.inf, np.float32)
    steps = np.zeros((tokens + 1, rows + 1), np.int8)  # 0: both, 1: the next token, 2: the next row
    total[0, 0], steps[0, :], steps[1:, 0] = 0, 2, 1
    for diagonal in range(2, tokens + rows + 1):
        i = np.arange(max(1, diagonal - rows), min(tokens, diagonal - 1) + 1)
        j = diagonal - i
        both, token, row = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        step = np.where((both < token) & (both < row), 0, np.where((token < both) & (token < row), 1, 2))
        steps[i, j] = step
        total[i, j] = costs[i - 1, j - 1] + np.choose(step, (both, token, row))
    entered = np.zeros(tokens, np.int64)
    i, j = tokens, rows
    while i > 0 or j > 0:
        step = steps[i, j]
        if i > 0:
            entered[i - 1] = j - 1  # the smallest of its places is the last one seen
        i, j = i - (step != 2), j - (step != 1)
    return entered


def words_of(
    tokens: Sequence[int],
    times: Sequence[tuple[float, float]],
    decode: Callable[[list[int]], str],
    language: str,
) -> list[Word]:
    """Return the words of tokens of text.

    Args:
        tokens: of a segment, without times and special ones.
        times: seconds at which each begins and ends.
        decode: returns the text of tokens.
        language: its code; it says whether words have spaces between.
    """
    parts = _characters(tokens, decode)
    if language not in _WITHOUT_SPACES:
        parts = _joined_at_spaces(parts)
    words, place = [], 0
    for text, count in _with_marks(parts):
        first, last = times[place], times[place + count - 1]
        words.append(Word(text=text, start=first[0], end=last[1]))
        place += count
    return words


def _characters(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[tuple[str, int]]:
    """Return the texts of tokens, and how many tokens each has: those that share a character are one."""
    whole, parts, begin, length = decode(list(tokens)), list[tuple[str, int]](), 0, 0
    for end in range(1, len(tokens) + 1):
        text = decode(list(tokens[begin:end]))
        place = length + text.find("\ufffd")
        # A character that is not whole; or one that was written so.
        if "\ufffd" in text and end < len(tokens) and whole[place : place + 1] != "\ufffd":
            continue
        parts.append((text, end - begin))
        begin, length = end, length + len(text)
    return parts


def _joined_at_spaces(parts: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return words, which begin with a space or are a mark."""
    words = list[tuple[str, int]]()
    for text, count in parts:
        if words and not text.startswith(" ") and text.strip() not in string.punctuation:
            words[-1] = (words[-1][0] + text, words[-1][1] + count)
        else:
            words.append((text, count))
    return words


def _with_marks(words: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return words with the marks that belong to them: opening ones behind a space, closing ones without."""
    opened = list[tuple[str, int]]()
    for text, count in reversed(words):
        if opened and text.startswith(" ") and text.strip() in _BEFORE:
            opened[-1] = (text + opened[-1][0], count + opened[-1][1])
        else:
            opened.append((text, count))
    closed = list[tuple[str, int]]()
    for text, count in reversed(opened):
        if closed and not closed[-1][0].endswith(" ") and text and text in _BEHIND:
            closed[-1] = (closed[-1][0] + text, closed[-1][1] + count)
        else:
            closed.append((text, count))
    return closed
