"""The interface of paged graphs: names of their inputs, and the rows of carryall's own caches.

Runners read it too, so this module does not import onnx_ir.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

BEGINS, PAST, TABLE = "cumulative_sequence_length", "past_seqlens", "block_table"
# In host memory: bounds on the new tokens of a row, on the tokens of a row after the run, and from below on
# those of the longest row (0: unknown). Without it, the kernel waits for the device in every layer.
BOUNDS = "attention_metadata"
# Of the graph of an encoder: the caches that layers with equal heads share, and how many tokens behind it a
# token sees.
KEYS, VALUES, AHEAD = "text_keys", "text_values", "tokens_ahead"
STATE_PLACES = "state_places"  # [rows], the index of each row's recurrent states

COMPRESSED = "compressed_kv"  # key of the metadata of graphs whose caches hold compressed keys and values
LARGEST_HEAD = 640  # of carryall's kernel
LAYOUT = 2  # version of its caches; the kernels refuse others
BLOCK_SIZE = 32  # positions of its blocks
# Its attribute ``cache_type``, and the bytes of a row of `width` elements.
CACHE_TYPES: Mapping[str, int] = {"float32": 0, "bfloat16": 1, "int8": 2}
# The same with queries that are rounded as keys are: to 8 bits, not to 16; to a bfloat16, where AMX would
# multiply two.
ROUNDED_QUERIES: Mapping[str, int] = {**CACHE_TYPES, "bfloat16": 4, "int8": 3}
CACHE_TYPE = "paged_cache_type"  # metadata key: which of these
_GROUP = 16


def table_input(window: int) -> str:
    """Return the name of the block table of layers with a window, in a graph that has several tables."""
    return f"{TABLE}_{window}" if window else TABLE


def text_rows(lengths: Sequence[int], block: int) -> dict[str, npt.NDArray[np.int32]]:
    """Return what describes texts one behind the other, each of which sees all of itself.

    Args:
        lengths: tokens of each text, at least 1.
        block: positions of a block of the caches; each text has blocks of its own.

    Returns:
        ``BEGINS`` [texts + 1], ``PAST`` [texts], ``TABLE`` [texts, most blocks] and ``AHEAD`` [tokens].
    """
    counts, begins = np.array(lengths), np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(counts, out=begins[1:])
    blocks = -(-counts // block)
    first = np.cumsum(blocks) - blocks
    table = first[:, None] + np.minimum(np.arange(blocks.max()), blocks[:, None] - 1)
    ahead = np.repeat(begins[1:], counts) - 1 - np.arange(begins[-1])
    return {
        BEGINS: begins,
        PAST: np.zeros(len(counts), np.int32),
        TABLE: table.astype(np.int32),
        AHEAD: ahead.astype(np.int32),
    }


def rows_input(groups: str, name: str) -> str:
    """Return the name of the input ``BEGINS``, ``PAST``, ``TABLE`` or ``AHEAD`` for groups of patches."""
    return f"{groups}_{name}"


def text_cache(name: str, kv_heads: int, row_bytes: int) -> str:
    """Return the name of the input ``KEYS`` or ``VALUES`` for the layers with heads of this size."""
    return f"{name}_{kv_heads}_{row_bytes}"


def cache_width(head_size: int) -> int:
    """Return the elements of a row in the cache."""
    return -(-head_size // _GROUP) * _GROUP


def row_bytes(head_size: int, cache_type: str) -> int:
    """Return the bytes of a position in one head of a cache."""
    width = cache_width(head_size)
    return {"float32": 4 * width, "bfloat16": 2 * width, "int8": width + 4}[cache_type]


def width_of(row_bytes: int, cache_type: str) -> int:
    """Return the elements of a row of so many bytes."""
    return {"float32": row_bytes // 4, "bfloat16": row_bytes // 2, "int8": row_bytes - 4}[cache_type]


def block_size(head_size: int) -> int:
    """Return the smallest number of tokens per block that FlashAttention's paged kernel supports."""
    return 256 if head_size <= 64 else 128 if head_size <= 128 else 64
