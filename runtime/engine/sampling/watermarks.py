"""Green lists and SynthID-Text: the values of tokens, and the logits processors that write them.

Both equal transformers bit for bit in which tokens are green and which values an n-gram has: the same
Mersenne twister draws the same permutations and tables (``torch.randperm``, ``torch.randint`` on a CPU).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...types.watermark import Watermark
from .candidates import top_candidates
from .filters import FilterColumns, Filters, WeightedCandidates
from .logits_processors import Logits

Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

_MULTIPLIER, _INCREMENT = np.uint64(6364136223846793005), np.uint64(1)


def draws(seed: int, count: int) -> npt.NDArray[np.int64]:
    """Return the first 32-bit numbers of the Mersenne twister, seeded as ``torch.manual_seed`` does."""
    generator = np.random.RandomState(seed & 0xFFFFFFFF)  # seeds by init_genrand, as torch's CPU generator
    return generator.randint(0, 2**32, count, np.uint32).astype(np.int64)


@functools.lru_cache(maxsize=512)  # of 16 kB for a vocabulary of 128,000
def _green(vocab_size: int, count: int, seed: int) -> bytes:
    """Return the bits of the green tokens: the first ``count`` of a random permutation of the vocabulary.

    ``torch.randperm`` swaps entry i with entry j_i = i + draw_i % (n - i) for i = 0, 1, ... The value that
    step i puts in its place is that which step k, the last one before it with j_k = j_i, has put there, and
    that is the value that was in place k: again that of the last step m < k with j_m = k. These chains are
    followed for all steps at once, by doubling.
    """
    steps = np.arange(count)
    places = steps + draws(seed, count) % (vocab_size - steps)
    moved = places > steps
    before = np.full(count, -1)  # by place below ``count``: the last earlier step that swapped it away
    inner = moved & (places < count)
    before[places[inner]] = steps[inner]
    # origin[k]: whose value is in place k when step k begins.
    origin = np.where(before < 0, steps, before)
    while True:
        further = origin[origin]
        if np.array_equal(further, origin):
            break
        origin = further
    order = np.argsort(places, kind="stable")
    repeated = np.concatenate([[False], places[order][1:] == places[order][:-1]])
    previous = np.full(count, -1)
    previous[order[1:]] = np.where(repeated[1:], order[:-1], -1)
    chosen = np.where(previous < 0, places, origin[previous])
    green = np.zeros(vocab_size, np.bool_)
    green[chosen] = True
    return np.packbits(green).tobytes()


def green_tokens(watermark: Watermark, vocab_size: int, before: int) -> Bools:
    """Return which tokens [vocab_size] are green after a token."""
    seed = watermark.key * before % (2**64 - 1)
    bits = _green(vocab_size, int(vocab_size * watermark.ratio), seed)
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=vocab_size).view(np.bool_)


class GreenList:
    """Raises the logits of the tokens that are green after the last one, of prompt or output.

    Args:
        watermark: of the kind ``green``.
        prompt_token_ids: [n].
    """

    lowers = False

    def __init__(self, watermark: Watermark, prompt_token_ids: npt.NDArray[np.int64]) -> None:
        self._watermark = watermark
        self._last = int(prompt_token_ids[-1])

    def observe(self, token: int) -> None:
        """Take the token as the last one."""
        self._last = token

    def apply(self, logits: Logits) -> None:
        """Add the bias."""
        logits[green_tokens(self._watermark, len(logits), self._last)] += np.float32(self._watermark.bias)


@functools.lru_cache(maxsize=16)
def _table(seed: int, size: int) -> npt.NDArray[np.int8]:
    return (draws(seed, size) % 2).astype(np.int8)


def _hashed(start: npt.NDArray[np.uint64], data: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return hashes [n] with one more number each [n or 1]: a linear congruential step."""
    with np.errstate(over="ignore"):
        return (start + data) * _MULTIPLIER + _INCREMENT


def context_hash(context: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return the hash [1] of the tokens before a token."""
    found = np.ones(1, np.uint64)
    for token in context:
        found = _hashed(found, np.array([token], np.uint64))
    return found


def ngram_values(
    watermark: Watermark, context: npt.NDArray[np.uint64], tokens: Integers
) -> npt.NDArray[np.int8]:
    """Return the values [keys, n] of tokens in the rounds of the tournament, 0 or 1.

    Args:
        watermark: of the kind ``synthid``.
        context: the hash [1] or [n] of the tokens before each.
        tokens: [n].
    """
    hashes = _hashed(context, tokens.astype(np.uint64))
    table = _table(watermark.table_seed, watermark.table_size)
    rounds = [_hashed(hashes, np.array([key], np.uint64)).view(np.int64) for key in watermark.keys]
    return np.stack([table[values % watermark.table_size] for values in rounds])


def kept_tokens(logits: Logits, filters: Filters) -> Integers:
    """Return the tokens that top-k, top-p and min-p keep, the most likely first."""
    possible = np.count_nonzero(logits > -np.inf)
    count = min(filters.top_k, possible) if filters.top_k else possible
    found = top_candidates([logits], np.array([max(1, count)]))
    weighted = WeightedCandidates(found.logits, FilterColumns.of([filters]))
    kept = int(weighted.num_kept(weighted.known)[0])
    tokens: Integers = found.token_ids[0, : min(max(kept, 1), max(1, count))]
    return tokens


class SynthId:
    """Draws tokens by a tournament: replaces the logits by the log-probabilities after it.

    The tournament is held among the tokens that temperature, top-k, top-p and min-p keep, and with their
    probabilities, so that these filters come before it and not after.

    Args:
        watermark: of the kind ``synthid``.
        filters: of the request.
    """

    lowers = False

    def __init__(self, watermark: Watermark, filters: Filters) -> None:
        self._watermark, self._filters = watermark, filters
        self._context = deque([0] * (watermark.ngram_length - 1), watermark.ngram_length - 1)
        self._seen = deque([0] * watermark.context_history, watermark.context_history)

    def observe(self, token: int) -> None:
        """Take the token into the context; it may not repeat an earlier one."""
        self._seen.appendleft(int(context_hash(self._context)[0]))
        self._context.append(token)

    def apply(self, logits: Logits) -> None:
        """Replace the logits; those of tokens that the filters drop become -inf."""
        tokens = kept_tokens(logits, self._filters)
        scores = logits[tokens].astype(np.float64) / self._filters.temperature
        weights = np.exp(scores - scores.max())
        shares = weights / weights.sum()
        context = context_hash(self._context)
        if int(context[0]) not in self._seen:
            for values in ngram_values(self._watermark, context, tokens):
                shares *= 1.0 + values - (values * shares).sum()
        logits.fill(-np.inf)
        with np.errstate(divide="ignore"):
            logits[tokens] = np.log(shares)
