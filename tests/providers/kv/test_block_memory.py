"""Blocks of carryall's attention kernel on the host: copies, and evictions that keep the right rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from native_attention import Cache, run
from native_kernels import isas
from paged_attention_reference import attention, random_case

from carryall.graph_opt.lower.paged_kv import CACHE_TYPES
from carryall.providers.base import KVEviction
from carryall.providers.kv.block_memory import BlockMemory, BlockShape

KEY, VALUE = "past_key_values.0.key", "past_key_values.0.value"


@pytest.mark.parametrize("cache_type", list(CACHE_TYPES))
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("isa", ["portable", "avx512bf16", "amx"])
def test_attention_after_an_eviction_is_that_of_the_kept_tokens(
    library: Path, cache_type: str, window: int, isa: str
) -> None:
    """The kernel writes 60 tokens, rows are evicted, and the kernel reads what is left."""
    if isa not in isas(library):
        pytest.skip(f"this processor has no {isa}")
    rounded = isa == "avx512bf16" and cache_type == "bfloat16"
    paired = rounded or (isa == "amx" and cache_type != "int8")
    rng = np.random.default_rng(0)
    case = random_case(
        rng, heads=(4, 2), size=20, lengths=[60], past=[0], block=32, cache=CACHE_TYPES[cache_type]
    )
    case.keys[0][[7, 31]] *= 9  # far from the mean
    cache = Cache(case, rng)
    cache.keys[...] = cache.values[...] = 0  # as mapped memory
    run(library, isa, case, cache)
    shape = BlockShape(2, 32, case.row_bytes, window, paired)
    memory = BlockMemory({KEY: shape, VALUE: shape}, cache.blocks, cache_type)
    memory.caches[KEY][...], memory.caches[VALUE][...] = cache.keys, cache.values
    blocks = [int(block) for block in cache.table[0, :2]]
    target = [block for block in range(cache.blocks) if block not in blocks][:1]
    memory.evict_kv([blocks], [target], 60, KVEviction(kept=28, sinks=4, recent=22))
    kept = [*range(4), *([36, 37] if window else [7, 31]), *range(38, 60)]
    after = random_case(
        rng, heads=(4, 2), size=20, lengths=[1], past=[28], block=32, cache=CACHE_TYPES[cache_type]
    )
    after.keys[0][:28], after.values[0][:28] = case.keys[0][kept], case.values[0][kept]
    cache.keys[...], cache.values[...] = memory.caches[KEY], memory.caches[VALUE]
    cache.table = np.array([target], np.int32)
    found = run(library, isa, after, cache)
    np.testing.assert_allclose(found, attention(after, rounded=rounded), rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("cache_type", ["float32", "bfloat16"])
def test_what_is_left_of_one_cache_is_attended_to(library: Path, cache_type: str) -> None:
    rng, kind = np.random.default_rng(0), CACHE_TYPES[cache_type]
    case = random_case(rng, heads=(4, 2), size=20, lengths=[60], past=[0], block=32, cache=kind)
    case.keys[0][[7, 31]] *= 9  # far from the mean
    case.values = case.keys
    cache = Cache(case, rng)
    cache.keys[...] = 0
    cache.values = cache.keys
    run(library, "portable", case, cache)
    memory = BlockMemory({KEY: BlockShape(2, 32, case.row_bytes, compressed=True)}, cache.blocks, cache_type)
    memory.caches[KEY][...] = cache.keys
    blocks = [int(block) for block in cache.table[0, :2]]
    target = [block for block in range(cache.blocks) if block not in blocks][:1]
    memory.evict_kv([blocks], [target], 60, KVEviction(kept=28, sinks=4, recent=22))
    kept = [*range(4), 7, 31, *range(38, 60)]
    after = random_case(rng, heads=(4, 2), size=20, lengths=[1], past=[28], block=32, cache=kind)
    after.keys[0][:28] = case.keys[0][kept]
    after.values = after.keys
    cache.keys[...] = memory.caches[KEY]
    cache.table = np.array([target], np.int32)
    np.testing.assert_allclose(run(library, "portable", after, cache), attention(after), rtol=3e-5, atol=3e-5)
    assert memory.layout == f"carryall blocks 2 {cache_type}: {KEY} [2, 32, {case.row_bytes}] as values"


def test_blocks_are_copied_read_and_written() -> None:
    shape = BlockShape(2, 16, 64)
    memory = BlockMemory({KEY: shape, VALUE: shape}, 4, "float32")
    assert shape.bytes_per_token == 128
    memory.caches[KEY][1], memory.caches[VALUE][1] = 5, 6
    memory.copy_block(0, 1, 3)
    parts = [part.copy() for part in memory.read([[3, 0]])]
    assert [int(part[0, 0, 0, 0]) for part in parts] == [5, 6]
    memory.write([[2, 1]], parts)
    assert [int(cache[2].min()) for cache in memory.caches.values()] == [5, 6]
    assert [int(cache[1].max()) for cache in memory.caches.values()] == [0, 0]
    assert memory.layout == f"carryall blocks 2 float32: {KEY} [2, 16, 64]; {VALUE} [2, 16, 64]"


def test_blocks_of_another_shape_are_not_written() -> None:
    memory = BlockMemory({KEY: BlockShape(2, 16, 64), VALUE: BlockShape(2, 16, 64)}, 4, "float32")
    for wrong in ((2, 2, 16, 64), (1, 2, 16, 65), (1, 4, 8, 64)):  # the last has as many bytes
        with pytest.raises(ValueError, match="blocks of"):
            memory.write([[1]], [np.ones(wrong, np.uint8)] * 2)
    with pytest.raises(ValueError, match="blocks of"):
        memory.write([[1]], [np.ones((1, 2, 16, 64), np.float32)] * 2)
    with pytest.raises(ValueError, match="zip"):
        memory.write([[1]], [np.ones((1, 2, 16, 64), np.uint8)])
    strided = np.arange(2 * 16 * 128, dtype=np.uint8).reshape(1, 2, 16, 128)[..., ::2]
    memory.write([[3]], [strided, strided])
    np.testing.assert_array_equal(memory.caches[VALUE][3:], strided)
    assert not memory.caches[KEY][2].any()


def test_groups_have_blocks_of_their_own() -> None:
    full, windowed = BlockShape(1, 16, 64), BlockShape(1, 16, 64, window=20, group=1)
    memory = BlockMemory({KEY: full, VALUE: full, "other.key": windowed}, 4, "float32")
    for value, cache in enumerate(memory.caches.values()):
        cache[1], cache[2] = 10 + value, 20 + value
    memory.copy_block(1, 2, 3)
    assert [int(cache[3].max()) for cache in memory.caches.values()] == [0, 0, 22]
    parts = [part.copy() for part in memory.read([[1, 2], [3]])]
    assert [part[:, 0, 0, 0].tolist() for part in parts] == [[10, 20], [11, 21], [22]]
    memory.write([[0, 3], [0]], parts)
    assert [int(cache[0].max()) for cache in memory.caches.values()] == [10, 11, 22]
