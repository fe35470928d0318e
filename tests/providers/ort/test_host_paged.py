"""Blocks of the CPU's own attention with windows in some layers: equal logits, and memory that is freed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_kit import window_bytes
from tiny_models import write_tiny

from carryall.providers.base import KVEviction, Row
from carryall.providers.kv_groups import FullKV, WindowKV
from carryall.providers.runners.paged_runner import PagedRunner
from carryall.runtime.models.loading import load_model

WINDOW = 70
TEXT = np.random.default_rng(0).integers(0, 256, 900)
# Each has layers with and without a window; layers of gemma4_text share caches.
FAMILIES = ["gemma2", "gemma3_text", "gemma4_text", "gpt_oss"]


@pytest.fixture(autouse=True)
def _library(kernels_of_this_machine: Path) -> None:
    """Every test of this module needs the library."""


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed") / request.param
    return write_tiny(request.param, folder, sliding_window=WINDOW, max_position_embeddings=2048)


def opened(checkpoint: Path, **options: Any) -> PagedRunner:
    loaded = load_model(checkpoint, max_slots=3, num_threads=1, provider_options=options)
    assert isinstance(loaded.runner, PagedRunner)
    return loaded.runner


def logits(runner: Any, slot: int, start: int, stop: int, wanted: int = 1) -> Any:
    return runner.forward([Row(slot, TEXT[start:stop], start, wanted)])[0].copy()


def test_windows_and_full_layers_are_groups(checkpoint: Path) -> None:
    runner = opened(checkpoint)
    kinds = {type(group): group for group in runner.info.kv_groups}
    assert set(kinds) == {FullKV, WindowKV}
    assert (runner.info.sliding_window, runner.info.trim_step) == (WINDOW, 256)
    assert 0 < window_bytes(runner.info) < runner.info.kv_bytes_per_token
    runner.close()


@pytest.mark.long
def test_logits_are_those_of_onnxruntime(checkpoint: Path) -> None:
    runner = opened(checkpoint, kv_cache="float32")
    other = load_model(checkpoint, max_slots=3, num_threads=1, provider_options={"kernels": "onnxruntime"})
    for start, stop in ((0, 300), (300, 301), (301, 640)):
        expected = logits(other.runner, 0, start, stop, stop - start)
        np.testing.assert_allclose(
            logits(runner, 0, start, stop, stop - start), expected, rtol=1e-4, atol=2e-4
        )
    runner.close()
    other.close()


@pytest.mark.long
@pytest.mark.parametrize("kv_cache", ["float32", "bfloat16", "int8"])
def test_freed_windows_change_no_bit(checkpoint: Path, kv_cache: str) -> None:
    """One slot is trimmed as it grows, another never; blocks that were freed are written by a third."""
    runner = opened(checkpoint, kv_cache=kv_cache)
    info = runner.info
    for start, stop in ((0, 300), (300, 520), (520, 521), (521, 770), (770, 800)):
        trimmed, whole = (logits(runner, slot, start, stop, 8 if stop - start > 8 else 1) for slot in (0, 1))
        np.testing.assert_array_equal(trimmed, whole)
        runner.trim(0, stop // 256 * 256)
        runner.forward([Row(2, TEXT[::-1][:stop], 0)])
        runner.check_integrity()
    runner.release(1)
    runner.release(2)
    freed = sum(group.freed(768) * group.bytes_per_token for group in info.kv_groups)
    assert freed == 512 * window_bytes(info)
    assert runner.kv_bytes == 800 * info.kv_bytes_per_token - freed
    runner.close()


def test_a_prefix_is_copied_with_its_window(checkpoint: Path) -> None:
    runner = opened(checkpoint)
    logits(runner, 0, 0, 700)
    expected = [logits(runner, 0, 640, 641), logits(runner, 0, 641, 800)]
    logits(runner, 0, 641, 700)
    runner.trim(0, 512)
    runner.copy_prefix(0, 1, 640)
    found = [logits(runner, 1, 640, 641), logits(runner, 1, 641, 800)]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    runner.check_integrity()
    runner.close()


def test_kv_of_all_groups_leaves_and_comes_back(checkpoint: Path) -> None:
    runner = opened(checkpoint)
    logits(runner, 0, 0, 512)
    chunks = [[part.copy() for part in runner.read_kv(0, start, 64)] for start in range(0, 512, 64)]
    expected = logits(runner, 0, 512, 600, 4)
    for number, parts in enumerate(chunks):
        runner.write_kv(2, 64 * number, 64, parts)
    np.testing.assert_array_equal(logits(runner, 2, 512, 600, 4), expected)
    runner.close()


def test_an_eviction_moves_the_rows_of_all_groups(checkpoint: Path) -> None:
    """Rows within every window and the whole text are kept, so nothing is lost."""
    runner = opened(checkpoint)
    logits(runner, 0, 0, 200)
    runner.copy_prefix(0, 1, 200)
    runner.evict_kv(1, 200, KVEviction(200, 4, 100))
    np.testing.assert_array_equal(logits(runner, 1, 200, 240), logits(runner, 0, 200, 240))
    runner.check_integrity()
    runner.close()
