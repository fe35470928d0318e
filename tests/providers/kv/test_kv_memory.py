"""KV storage on reserved memory: touched pages take memory, released pages do not."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from carryall.errors import ProviderRuntimeError
from carryall.providers.base import KVEviction
from carryall.providers.kv import kv_memory
from carryall.providers.kv.kv_memory import KEPT_BYTES, KVMemory, KVSpec, padded_length
from carryall.providers.ort.slot_memory import HostMemory

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
DTYPES = [np.float32, np.float16, np.int8, ml_dtypes.bfloat16]


def specs(dtype: type = np.float32, heads: int = 2, width: int = 16) -> dict[str, KVSpec]:
    return {name: KVSpec(heads, width, np.dtype(dtype)) for name in ("key", "value")}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_have_the_asked_shape_and_start_at_zero(dtype: type) -> None:
    memory = KVMemory(specs(dtype), slots=3, length=100)
    assert memory.buffers["key"].shape == (3, 2, memory.length, 16)
    assert memory.buffers["key"].dtype == dtype
    assert memory.length >= 100
    assert not memory.buffers["value"].astype(np.float32).any()


@given(
    length=st.integers(1, 5000),
    sizes=st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from([8, 16, 64, 80, 128])), min_size=1, max_size=3
    ),
    dtype=st.sampled_from(DTYPES),
)
def test_slots_start_on_page_boundaries(length: int, sizes: list[tuple[int, int]], dtype: type) -> None:
    caches = {str(i): KVSpec(heads, width, np.dtype(dtype)) for i, (heads, width) in enumerate(sizes)}
    padded = padded_length(length, caches)
    assert padded >= length
    for spec in caches.values():
        assert padded * spec.bytes_per_token % mmap.PAGESIZE == 0


@linux
def test_reserving_is_free_and_release_gives_back() -> None:
    before = resident_bytes()
    memory = KVMemory(specs(heads=8, width=128), slots=8, length=40_960)
    assert sum(buffer.nbytes for buffer in memory.buffers.values()) > 2.5e9
    assert resident_bytes() - before < 2e6
    memory.buffers["key"][5, :, :2048] = 1
    assert resident_bytes() - before > 8e6
    memory.release(5)
    assert resident_bytes() - before < 2e6
    kept = KEPT_BYTES // sum(spec.bytes_per_token for spec in specs(heads=8, width=128).values())
    assert memory.buffers["key"][5, :, :kept].all(), "short texts use the same pages again"
    assert not memory.buffers["key"][5, :, kept:2048].any()


@linux
def test_release_keeps_whole_pages_or_nothing() -> None:
    big = {f"key{layer}": KVSpec(8, 128, np.dtype(np.float32)) for layer in range(60)}
    memory = KVMemory(big, slots=2, length=64)
    for buffer in memory.buffers.values():
        buffer[:] = 1
    memory.release(0)
    for buffer in memory.buffers.values():
        assert not buffer[0].any()
        assert buffer[1].all()


def test_release_leaves_the_neighbours_alone() -> None:
    memory = KVMemory(specs(), slots=3, length=10)
    for slot in range(3):
        memory.buffers["key"][slot] = slot + 1
    memory.release(1)
    assert (memory.buffers["key"][0] == 1).all()
    assert (memory.buffers["key"][2] == 3).all()


def test_without_madvise_memory_stays_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "_GIVE_BACK", None)
    memory = KVMemory(specs(), slots=1, length=10)
    memory.buffers["key"][0] = 1
    memory.release(0)
    assert not memory.gives_back
    assert (memory.buffers["key"][0] == 1).all()
    windowed = {"key": KVSpec(2, 16, np.dtype(np.float32), 8)}
    assert not HostMemory(windowed, 1, 10).trims
    monkeypatch.undo()
    assert HostMemory(windowed, 1, 10).trims == memory.gives_back


def test_copy_prefix_copies_every_buffer_and_no_further() -> None:
    memory = KVMemory(specs(), slots=2, length=10)
    rng = np.random.default_rng(0)
    for buffer in memory.buffers.values():
        buffer[:] = rng.standard_normal(buffer.shape)
    beyond = memory.buffers["key"][1, :, 7:].copy()
    memory.copy_prefix(0, 1, 7)
    for buffer in memory.buffers.values():
        np.testing.assert_array_equal(buffer[1, :, :7], buffer[0, :, :7])
    np.testing.assert_array_equal(memory.buffers["key"][1, :, 7:], beyond)


@linux
def test_close_frees_the_address_space() -> None:
    def mapped_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    before = mapped_bytes()
    memory = KVMemory(specs(heads=8, width=128), slots=8, length=40_960)
    memory.close()
    assert mapped_bytes() - before < 1e8


def test_too_much_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        ProviderRuntimeError, match=r"GiB of address space for KV buffer 'key': .*Lower max_slots"
    ):
        KVMemory(specs(heads=1024, width=1024), slots=2**20, length=2**20)


@linux
def test_only_pages_behind_a_window_are_released() -> None:
    widths = {
        "windowed": KVSpec(4, 64, np.dtype(np.float32), 512),
        "whole": KVSpec(4, 64, np.dtype(np.float32)),
    }
    memory = KVMemory(widths, slots=3, length=8192)
    for buffer in memory.buffers.values():
        buffer[1:, :, :8000] = 1
    before = resident_bytes()
    assert memory.held_bytes(np.array([0, 8000, 8000])) == 4 * 8000 * 4 * 256
    memory.trim(1, 8000)
    gone = 8001 - 512
    assert memory.held_bytes(np.array([0, 8000, 8000])) == (4 * 8000 - gone) * 4 * 256
    assert before - resident_bytes() > 0.99 * 4 * gone * 256
    assert (memory.buffers["windowed"][1, :, gone:8000] == 1).all()
    assert (memory.buffers["whole"][1, :, :8000] == 1).all()
    assert (memory.buffers["windowed"][2, :, :8000] == 1).all()
    memory.copy_prefix(1, 0, 8000)
    assert (memory.buffers["windowed"][0, :, gone:8000] == 1).all()
    assert (memory.buffers["whole"][0, :, :8000] == 1).all()
    assert not memory.buffers["windowed"][0, :, : gone // 2].any()
    memory.release(1)
    memory.buffers["windowed"][1, :, :600] = 2
    memory.copy_prefix(1, 2, 600)
    assert (memory.buffers["windowed"][2, :, :600] == 2).all()


@given(
    held=st.integers(1, 60),
    percent=st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100)),
    dtype=st.sampled_from(DTYPES),
)
def test_eviction_keeps_sinks_recent_rows_and_the_most_distinct_keys_with_their_values(
    held: int, percent: tuple[int, int, int], dtype: type
) -> None:
    kept = percent[0] * held // 100
    sinks = percent[1] * kept // 100
    recent = percent[2] * (kept - sinks) // 100
    assume(held - sinks - recent != 2)  # two rows have the same distance from their mean
    wide = {name: KVSpec(2, 16, np.dtype(dtype)) for name in ("0.key", "0.value")}
    memory = KVMemory(wide, slots=2, length=60)
    rng = np.random.default_rng(held)
    for buffer in memory.buffers.values():
        buffer[:] = rng.integers(-100, 100, buffer.shape)
    keys, values = (buffer[1].astype(np.float64) for buffer in memory.buffers.values())
    other = memory.buffers["0.key"][0].copy()
    memory.evict_kv(1, held, KVEviction(kept, sinks, recent))
    for head in range(2):
        middle = keys[head, sinks : held - recent]
        distances = np.linalg.norm(middle - middle.sum(axis=0) / max(1, len(middle)), axis=1)
        best = np.sort(np.argsort(-distances)[: kept - sinks - recent]) + sinks
        rows = [*range(sinks), *best, *range(held - recent, held)]
        np.testing.assert_array_equal(memory.buffers["0.key"][1, head, :kept], keys[head, rows])
        np.testing.assert_array_equal(memory.buffers["0.value"][1, head, :kept], values[head, rows])
    np.testing.assert_array_equal(memory.buffers["0.key"][0], other)


@linux
def test_eviction_from_a_long_prompt_gives_memory_back() -> None:
    wide = {name: KVSpec(4, 64, np.dtype(np.float32)) for name in ("0.key", "0.value")}
    memory = KVMemory(wide, slots=2, length=8192)
    for buffer in memory.buffers.values():
        buffer[:, :, :8000] = 1
    before = resident_bytes()
    memory.evict_kv(0, 8000, KVEviction(512, 4, 256))
    assert before - resident_bytes() > 0.9 * 2 * 4 * 256 * (8000 - 1024)
    assert all((buffer[1, :, :8000] == 1).all() for buffer in memory.buffers.values())
