"""KV eviction in blocks: the right rows are kept and unchanged, wherever they are moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny_models import write_tiny

from carryall.providers.base import KVEviction, Row
from carryall.providers.kv.kv_blocks import AFFINE_BYTES, BlockLayer
from carryall.providers.runners.paged_runner import Span
from carryall.runtime.api.llm import LLM

HEADS, SIZE, WIDTH, BLOCKS = 2, 4, 6, 20


def affine(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return rows of 8 bits, each after its own scale and zero point."""
    low, high = values.min(-1, keepdims=True), values.max(-1, keepdims=True)
    scale = (high - low) / 255
    zero = -low / scale
    numbers = np.concatenate([scale, zero], axis=-1).astype(np.float32)
    return np.concatenate([numbers.view(np.uint8), np.rint(values / scale + zero).astype(np.uint8)], axis=-1)


FORMS: dict[str, Any] = {
    "f32": lambda values: values,
    "f16": lambda values: values.astype(np.float16),
    "bf16": lambda values: values.astype(ml_dtypes.bfloat16).view(np.float16),
    "u8": affine,
}


def as_numbers(rows: npt.NDArray[Any], form: str) -> npt.NDArray[np.float64]:
    if form == "u8":
        scale, zero = np.frombuffer(rows[:AFFINE_BYTES].tobytes(), np.float32)
        numbers: npt.NDArray[np.float64] = (rows[AFFINE_BYTES:].astype(np.float64) - zero) * scale
        return numbers
    return (rows.view(ml_dtypes.bfloat16) if form == "bf16" else rows).astype(np.float64)


def in_order(cache: npt.NDArray[Any], blocks: list[int], head: int, count: int) -> list[npt.NDArray[Any]]:
    return [cache[blocks[i // SIZE], head, i % SIZE].copy() for i in range(count)]


@given(
    held=st.integers(3, 40),
    data=st.data(),
    form=st.sampled_from(list(FORMS)),
    windowed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_rows_that_stay_are_the_right_ones_as_they_were(
    held: int, data: st.DataObject, form: str, windowed: bool, seed: int
) -> None:
    kept = data.draw(st.integers(2, held))
    sinks = data.draw(st.integers(0, kept - 1))
    recent = data.draw(st.integers(1, kept - sinks))
    places = data.draw(st.permutations(range(BLOCKS)))
    blocks, targets = places[: -(-held // SIZE)], data.draw(st.permutations(places))[: -(-kept // SIZE)]
    rng = np.random.default_rng(seed)
    keys, values = (
        FORMS[form](rng.normal(size=(BLOCKS, HEADS, SIZE, WIDTH)).astype(np.float32)) for _ in range(2)
    )
    before = [[in_order(cache, blocks, head, held) for head in range(HEADS)] for cache in (keys, values)]
    layer = BlockLayer(keys, values, form == "bf16", windowed)
    layer.evict_kv(blocks, targets, held, KVEviction(kept, sinks, recent))
    for head in range(HEADS):
        numbers = np.stack([as_numbers(row, form) for row in before[0][head]])
        middle = numbers[sinks : held - recent]
        chosen = np.arange(len(middle))
        if len(middle) and not windowed:
            distances = np.linalg.norm(middle - middle.mean(axis=0), axis=1)
            assume(np.diff(np.sort(distances), append=np.inf).min() > 1e-4)
            chosen = np.argsort(distances)
        best = np.sort(chosen[len(middle) - (kept - sinks - recent) :]) + sinks
        stay = [*range(sinks), *best.tolist(), *range(held - recent, held)]
        for cache, old in ((keys, before[0]), (values, before[1])):
            found = in_order(cache, targets, head, kept)
            for row, source in zip(found, stay, strict=True):
                np.testing.assert_array_equal(row, old[head][source])


@pytest.mark.long
@pytest.mark.parametrize(("options", "form"), [({"kv_cache": "int8"}, "u8"), ({}, "f32")])
def test_rows_are_read_as_openvino_writes_them(
    options: dict[str, Any], form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino")
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    checkpoint = write_tiny("qwen3", tmp_path / "tiny")
    found = []
    for own in ({"inference_precision": "f32", "kv_cache_precision": "f32"}, options):
        with LLM(checkpoint, provider="openvino", max_slots=1, num_threads=1, provider_options=own) as llm:
            runner: Any = llm.engine.runner
            runner.forward([Row(0, np.arange(20), 0)])
            assert runner.info.evicts_kv
            keys, *_ = runner.session.read_blocks(runner._tables.of(0), Span(0, 20))
            found.append(keys[0].copy())
    for head in range(len(found[0])):
        for exact, row in zip(found[0][head, :20], found[1][head, :20], strict=True):
            step = np.ptp(exact) / 255 if form == "u8" else 0
            np.testing.assert_allclose(as_numbers(row, form), exact, atol=step + 1e-6)


@pytest.mark.parametrize("precision", ["auto", "u4"])
def test_rows_that_share_scales_or_bytes_do_not_move(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino")
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    options = {"kv_cache_precision": precision}
    with LLM(
        write_tiny("qwen3", tmp_path / "tiny"), provider="openvino", max_slots=1, provider_options=options
    ) as llm:
        runner: Any = llm.engine.runner
        tensors = [
            (keys.element_type, keys.shape, values.shape) for keys, values, _ in runner.session._layers
        ]
        plain = all(kind.bitwidth > 8 and keys == values for kind, keys, values in tensors)
        assert runner.info.evicts_kv == plain
