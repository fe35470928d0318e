"""PagedAttention in NumPy, in float64: the whole score matrix of one row after another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int32]
FLOAT32, BFLOAT16, INT8, BYTE_QUERIES, BFLOAT16_QUERIES = range(5)
INT8_CACHES = (INT8, BYTE_QUERIES)  # queries have 16 bits, or 8
BFLOAT16_CACHES = (BFLOAT16, BFLOAT16_QUERIES)  # queries may be rounded, or are where AMX multiplies them
_EIGHT_BITS, _SIXTEEN_BITS = 127, 127 * 256  # the largest rounded number
_PART = 256  # positions of a partial softmax
# 2^x for x in [0, 1) with an error of 7.5e-5, the highest power first: a weight before it is rounded.
POWER_OF_2 = [7.802452264047956e-2, 2.2606715542748315e-1, 6.958335404947528e-1, 9.999252185627154e-1]
# Of an int8 cache: a weight near a tie is rounded to its other neighbour, 1 / 32512 of the power of 2 above
# the largest weight away, so at most 2 / 32512 of that one; values are up to 4.
INT8_TOLERANCE = 2.5e-4


@dataclass
class Case:
    """A run of the operator.

    Args:
        heads: query heads.
        kv_heads: heads of keys and values.
        size: elements of a head.
        lengths: new tokens of each row.
        past: tokens of each row in the cache.
        keys: [kv_heads, size] of every past and new token of each row; new ones are not rotated.
        values: the same.
        query: [tokens, heads * size].
        positions: [tokens], rows of ``angles``.
        angles: cosines and sines [positions, rotary / 2]; None without rotary embedding.
        ahead: [tokens], how many positions behind each token it sees too; None for none.
    """

    heads: int
    kv_heads: int
    size: int
    lengths: list[int]
    past: list[int]
    keys: list[Floats]
    values: list[Floats]
    query: Floats
    positions: npt.NDArray[np.int64]
    window: int = 0
    softcap: float = 0.0
    scale: float = 1.0
    interleaved: int = 0
    cache: int = FLOAT32
    sinks: Floats | None = None
    slopes: Floats | None = None
    angles: tuple[Floats, Floats] | None = None
    ahead: Integers | None = None
    block: int = 16
    begins: Integers = field(init=False)

    def __post_init__(self) -> None:
        self.begins = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    @property
    def rotary(self) -> int:
        """Number of rotated elements of a head."""
        return 0 if self.angles is None else 2 * self.angles[0].shape[1]

    @property
    def row_bytes(self) -> int:
        """Bytes of a position in the cache."""
        width = -(-self.size // 16) * 16
        size = 4 if self.cache == FLOAT32 else 2
        return width + 4 if self.cache in INT8_CACHES else size * width

    def new_rows(self, parts: list[Floats]) -> Floats:
        """Return keys or values of the new tokens, [tokens, kv_heads * size]."""
        rows = [part[past:] for part, past in zip(parts, self.past, strict=True)]
        return np.concatenate(rows).reshape(-1, self.kv_heads * self.size)


def random_case(
    rng: np.random.Generator,
    *,
    heads: tuple[int, int],
    size: int,
    lengths: list[int],
    past: list[int],
    rotary: int = 0,
    sinks: bool = False,
    slopes: bool = False,
    ahead: bool = False,
    **options: Any,
) -> Case:
    """Return a case with normal values; angles are of unrelated positions, so that a mix-up shows.

    ``ahead`` has precedence over ``slopes``, with which it cannot be combined.
    """
    totals = [length + before for length, before in zip(lengths, past, strict=True)]
    keys, values = (
        [rng.standard_normal((total, heads[1], size)).astype(np.float32) for total in totals]
        for _ in range(2)
    )
    tokens, table = sum(lengths), 50
    turns = rng.uniform(0, 6, (table, rotary // 2))
    return Case(
        heads[0],
        heads[1],
        size,
        lengths,
        past,
        keys,
        values,
        query=rng.standard_normal((tokens, heads[0] * size)).astype(np.float32),
        positions=rng.integers(0, table, tokens),
        scale=size**-0.5,
        sinks=rng.standard_normal(heads[0]).astype(np.float32) if sinks else None,
        slopes=rng.uniform(0, 1, heads[0]).astype(np.float32) ** 2 if slopes and not ahead else None,
        ahead=np.concatenate([random_ahead(rng, length) for length in lengths]) if ahead else None,
        angles=(np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)) if rotary else None,
        **options,
    )


def random_ahead(rng: np.random.Generator, length: int) -> Integers:
    """Return how far the tokens of a row see: pictures of different lengths, and text between them."""
    ahead, start = np.zeros(length, np.int32), 0
    while start < length:
        size = min(int(rng.choice([1, 1, 3, 20, 70])), length - start)
        ahead[start : start + size] = np.arange(size)[::-1]
        start += size
    return ahead


def attention(case: Case, *, rounded: bool = False) -> npt.NDArray[np.float64]:
    """Return the result [tokens, heads * size].

    Args:
        case: the run.
        rounded: round queries and weights to bfloat16, and divide by the sum of the rounded weights. An int8
            cache rounds them to 16 bits in any case.
    """
    found = []
    group = case.heads // case.kv_heads
    for row, (length, past) in enumerate(zip(case.lengths, case.past, strict=True)):
        if not length:
            continue
        own = slice(case.begins[row], case.begins[row + 1])
        query = _rotated(case, case.query[own].reshape(length, case.heads, case.size), own)
        keys, values = case.keys[row].copy(), case.values[row]
        keys[past:] = _rotated(case, keys[past:], own)
        scaled = query.astype(np.float64) * case.scale
        if case.cache in INT8_CACHES:
            spread = _spread(query.astype(np.float32) * np.float32(case.scale))
            levels = _SIXTEEN_BITS if case.cache == INT8 else _EIGHT_BITS
            keys, scaled = _spread(keys), _rounded(spread, _largest(spread), levels)
        stored, added = (_stored(case, part).repeat(group, axis=1) for part in (keys, values))
        if rounded:  # so that scores are multiples of log(2)
            scaled = _bfloat16(scaled * np.log2(np.e)) / np.log2(np.e)
        scores = np.einsum("qhd,khd->hqk", scaled, stored)
        if case.softcap:
            scores = case.softcap * np.tanh(scores / case.softcap)
        back = (past + np.arange(length))[:, None] - np.arange(past + length)
        if case.slopes is not None:
            scores = scores - case.slopes[:, None, None].astype(np.float64) * back
        ahead = np.zeros(length) if case.ahead is None else case.ahead[own]
        seen = (back >= -ahead[:, None]) & (back < (case.window or 2**40))
        scores = np.where(seen, scores, -np.inf)
        sinks = np.full(case.heads, -np.inf) if case.sinks is None else case.sinks
        most = np.maximum(scores.max(axis=-1, initial=-np.inf), sinks[:, None])[..., None]
        weights = np.exp(scores - most)
        if rounded:
            weights = _rounded_weights(scores, most)
        total = weights.sum(axis=-1, keepdims=True) + np.exp(sinks[:, None, None] - most)
        if case.cache in INT8_CACHES:
            # The scale of a value is a factor of its weight: both are rounded together.
            scales = np.where(seen, _largest(values)[..., 0].T.repeat(group, axis=0)[:, None], 0.0)
            # Weights are relative to the power of 2 above the largest one.
            above = np.ceil(_largest_of_parts(scores) / np.log(2)) * np.log(2)
            kept = _rounded(np.exp(scores - above) * scales, _largest_of_parts(scales), _SIXTEEN_BITS)
            weights = kept / np.where(scales > 0, scales, 1) * np.exp(above - most)
        found.append(
            np.einsum("hqk,khd->qhd", weights / total, added).reshape(length, case.heads * case.size)
        )
    return np.concatenate(found)


def _rotated(case: Case, x: Floats, tokens: slice) -> Floats:
    if case.angles is None or not len(x):
        return x
    cos, sin = (table[case.positions[tokens]][:, None].astype(np.float64) for table in case.angles)
    half = case.rotary // 2
    pair = (slice(0, case.rotary, 2), slice(1, case.rotary, 2))
    if not case.interleaved:
        pair = (slice(0, half), slice(half, case.rotary))
    first, second = (x[..., part].astype(np.float64) for part in pair)
    y = x.copy()
    y[..., pair[0]] = first * cos - second * sin
    y[..., pair[1]] = second * cos + first * sin
    return y


def _bfloat16(x: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def _largest_of_parts(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the largest score of the part of each position; 0 where none is seen."""
    parts = [scores[..., first : first + _PART] for first in range(0, scores.shape[-1], _PART)]
    largest = [np.broadcast_to(part.max(axis=-1, keepdims=True), part.shape) for part in parts]
    found = np.concatenate(largest, axis=-1)
    return np.where(np.isinf(found), 0.0, found)


def _rounded_weights(
    scores: npt.NDArray[np.float64], most: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return exp(scores - most) as the kernel rounds it: a cubic, which is in [1, 2], to bfloat16."""
    powers = np.where(np.isinf(scores), -1e3, scores * np.log2(np.e))
    whole = np.floor(powers)
    rounded = np.floor(np.polyval(POWER_OF_2, powers - whole) * 128 + 0.5) / 128
    return np.where(np.isinf(scores), 0.0, rounded * np.exp2(whole - most * np.log2(np.e)))


def _largest(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = np.abs(x).max(axis=-1, keepdims=True)
    return found


def _rounded(x: npt.NDArray[Any], most: npt.NDArray[Any], levels: int) -> npt.NDArray[np.float64]:
    steps = np.float32(levels) / np.where(most > 0, most, 1).astype(np.float32)
    rounded: npt.NDArray[np.float64] = np.rint(x.astype(np.float64) * steps) / steps.astype(np.float64)
    return rounded


def _spread(x: npt.NDArray[Any]) -> Floats:
    """Return the Walsh-Hadamard transform of rows with zeros up to a multiple of 16.

    In float32 and with the operations of the kernel, so that the same elements are rounded up.
    """
    width = -(-x.shape[-1] // 16) * 16
    piece, half = width & -width, 1
    y = np.zeros((*x.shape[:-1], width), np.float32)
    y[..., : x.shape[-1]] = x
    y *= np.float32(1) / np.sqrt(np.float32(piece))
    while half < piece:
        pairs = y.reshape(*x.shape[:-1], width // (2 * half), 2, half)
        first, second = pairs[..., :1, :], pairs[..., 1:, :]
        y = np.concatenate([first + second, first - second], axis=-2).reshape(y.shape)
        half *= 2
    return y


def _stored(case: Case, x: Floats) -> npt.NDArray[np.float64]:
    """Return what the cache holds of float rows."""
    if case.cache in BFLOAT16_CACHES:
        return _bfloat16(x)
    if case.cache in INT8_CACHES:
        most = _largest(x)
        rounded: npt.NDArray[np.float64] = np.rint(x * (127 / most)).astype(np.float64) * (most / 127)
        return rounded
    return x.astype(np.float64)
