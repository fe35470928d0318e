"""Call PagedAttention of a library without onnxruntime, with a cache in shuffled blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from paged_attention_reference import Case, Floats

from carryall.providers.native.library import load

_NUMBERS = ["heads", "kv_heads", "size", "block", "window", "rotary", "interleaved", "cache_type"]
_ROWS = ["query", "key", "value", "keys", "values", "past", "begins", "table"]
_ARRAYS = [*_ROWS, "cosines", "sines", "sinks", "slopes"]
_COUNTS = ["blocks", "rows", "table_width", "tokens", "angles"]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in [*_ARRAYS, "positions", "ahead"]),
        *((name, ctypes.c_int64) for name in _COUNTS),
        ("output", ctypes.c_void_p),
    ]


class Cache:
    """Keys and values of some rows in blocks, in a random order, the memory of others between them.

    Args:
        case: a run, for the sizes.
        rng: shuffles the blocks, and fills unused memory with NaN.
        capacity: positions of each row.
    """

    def __init__(self, case: Case, rng: np.random.Generator, capacity: Sequence[int] | None = None) -> None:
        ends = [sum(pair) for pair in zip(case.past, case.lengths, strict=True)]
        needed = [-(-end // case.block) for end in capacity or ends]
        self.blocks = sum(needed) + 2
        order = rng.permutation(self.blocks)
        self.table = np.full((len(needed), max(needed) + 1), -1, np.int32)
        for row, count in enumerate(needed):
            self.table[row, :count] = order[sum(needed[:row]) : sum(needed[: row + 1])]
        shape = (self.blocks, case.kv_heads, case.block, case.row_bytes)
        self.keys, self.values = (np.full(shape, 0xFF, np.uint8) for _ in range(2))


def run(
    library: Path,
    isa: str,
    case: Case,
    cache: Cache,
    *,
    separate: int = 16,
    wrong: Mapping[str, Any] | None = None,
) -> Floats:
    """Write the new tokens into the cache and return the result [tokens, heads * size].

    Raises:
        ValueError: the library refuses the arguments.
    """
    cosines, sines = case.angles or (None, None)
    arrays: dict[str, npt.NDArray[Any] | None] = {
        "query": case.query,
        "key": case.new_rows(case.keys),
        "value": case.new_rows(case.values),
        "keys": cache.keys,
        "values": cache.values,
        "past": np.array(case.past, np.int32),
        "begins": case.begins,
        "table": cache.table,
        "cosines": cosines,
        "sines": sines,
        "sinks": case.sinks,
        "slopes": case.slopes,
        "positions": case.positions,
        "ahead": case.ahead,
    }
    numbers = {
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "size": case.size,
        "block": case.block,
        "window": case.window,
        "rotary": case.rotary,
        "interleaved": case.interleaved,
        "cache_type": case.cache,
        "scale": case.scale,
        "softcap": case.softcap,
        "blocks": cache.blocks,
        "rows": len(case.past),
        "table_width": cache.table.shape[1],
        "tokens": len(case.query),
        "angles": 0 if cosines is None else len(cosines),
    }
    for name, value in (wrong or {}).items():
        (numbers if name in numbers else arrays)[name] = value
    output = np.full(case.query.shape, np.nan, np.float32)
    kept = {name: None if array is None else np.ascontiguousarray(array) for name, array in arrays.items()}
    addresses = {name: None if array is None else array.ctypes.data for name, array in kept.items()}
    call = _Call(**numbers, **addresses, output=output.ctypes.data)
    message = ctypes.create_string_buffer(200)
    failed = load(library).carryall_attention(
        isa.encode(), ctypes.byref(call), ctypes.c_int64(separate), message, ctypes.c_int64(len(message))
    )
    if failed:
        raise ValueError(message.value.decode())
    return output


def filled(library: Path, isa: str, case: Case, rng: np.random.Generator, **options: Any) -> Floats:
    """Run a case: first the past tokens, unrotated, into the cache, then the new ones."""
    cache = Cache(case, rng)
    before = Case(
        case.heads,
        case.kv_heads,
        case.size,
        case.past,
        [0] * len(case.past),
        [part[:past] for part, past in zip(case.keys, case.past, strict=True)],
        [part[:past] for part, past in zip(case.values, case.past, strict=True)],
        query=np.zeros((sum(case.past), case.heads * case.size), np.float32),
        positions=np.zeros(sum(case.past), np.int64),
        block=case.block,
        cache=case.cache,
    )
    if sum(case.past):
        run(library, isa, before, cache)
    return run(library, isa, case, cache, **options)
