"""KV of a paged device that leaves it and comes back, with the CPU as the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from device_stand_ins import PagedCudaOnCpu, threaded
from engine_kit import make_request, run
from late_device import LateCudaOnCpu
from tiny_models import write_tiny

from carryall.errors import ProviderRuntimeError, ProviderUnavailableError
from carryall.exporter.export import export_model
from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.pipeline import pipeline
from carryall.providers.base import Row, RunnerConfig
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.types.sampling_params import SamplingParams

CONTEXT, SLOTS, VOCAB, CHUNK = 300, 3, 260, 64
Open = Callable[..., Any]
TEXT = np.random.default_rng(4).integers(0, VOCAB, CONTEXT)


class LargeBlocks(PagedCudaOnCpu):
    """Blocks of a head size of up to 128, which hold two chunks."""

    name = "large-blocks-on-cpu"

    def block_size(self, head_size: int) -> int:
        return 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moves")
    config = RunnerConfig(context_length=CONTEXT)
    exported = export_model(write_tiny("qwen3", folder / "checkpoint"))
    lowered, _ = pipeline.run(exported, PagedCudaOnCpu().passes(config))
    save_model(lowered, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.fixture
def opened(model: Path) -> Iterator[Open]:
    runners = []

    def opener(provider: Any = LargeBlocks, slots: int = SLOTS) -> Any:
        config = RunnerConfig(max_slots=slots, context_length=CONTEXT, num_threads=1)
        runners.append(provider().runner(model, config))
        return runners[-1]

    yield opener
    for runner in runners:
        runner.close()


def filled(runner: Any, length: int, text: npt.NDArray[np.int64] = TEXT, slot: int = 0) -> None:
    runner.forward([Row(slot, text[:length], 0, 0)])


def chunks(runner: Any, slot: int, length: int) -> list[list[npt.NDArray[Any]]]:
    return [[part.copy() for part in runner.read_kv(slot, start, CHUNK)] for start in range(0, length, CHUNK)]


def logits(runner: Any, slot: int, start: int, text: npt.NDArray[np.int64] = TEXT) -> npt.NDArray[Any]:
    (found,) = runner.forward([Row(slot, text[start : start + 5], start, 5)])
    array: npt.NDArray[Any] = np.array(found)
    return array


@pytest.mark.long
@pytest.mark.parametrize("target", [LargeBlocks, PagedCudaOnCpu])
def test_chunks_of_blocks_of_any_size_continue_a_text(opened: Open, target: Any) -> None:
    runner, other = opened(), opened(target)
    assert runner.info.kv_layout == other.info.kv_layout != ""
    filled(runner, 256)
    parts = chunks(runner, 0, 256)
    assert {part.shape[0] for chunk in parts for part in chunk} == {CHUNK}
    for number, chunk in enumerate(parts):
        other.write_kv(1, number * CHUNK, CHUNK, chunk)
    np.testing.assert_array_equal(logits(other, 1, 256), logits(runner, 0, 256))


def test_a_block_that_another_slot_reads_is_copied_before_a_chunk_is_written(opened: Open) -> None:
    runner, other = opened(), np.random.default_rng(9).integers(0, VOCAB, CONTEXT)
    mixed = np.concatenate([TEXT[:CHUNK], other[CHUNK:]])
    filled(runner, 128)
    before = logits(runner, 0, 128)
    filled(runner, 128, mixed, slot=2)
    second = chunks(runner, 2, 128)[1]
    runner.copy_prefix(0, 1, CHUNK)
    runner.write_kv(1, CHUNK, CHUNK, second)
    np.testing.assert_array_equal(logits(runner, 0, 128), before)
    np.testing.assert_array_equal(logits(runner, 1, 128, mixed), logits(runner, 2, 128, mixed))


def test_kv_of_another_layout_is_refused_and_the_slot_keeps_what_it_had(opened: Open) -> None:
    runner = opened()
    filled(runner, 128)
    first, second = chunks(runner, 0, 128)
    runner.write_kv(1, 0, CHUNK, first)
    for wrong in (second[:-1], [part[:-1] for part in second], [part.view(np.int8) for part in second]):
        with pytest.raises(ProviderRuntimeError, match="another layout than positions: past_key"):
            runner.write_kv(1, CHUNK, CHUNK, wrong)
    runner.write_kv(1, CHUNK, CHUNK, second)
    np.testing.assert_array_equal(logits(runner, 1, 128), logits(runner, 0, 128))


def test_positions_that_are_missing_or_begin_within_a_chunk_are_refused(opened: Open) -> None:
    runner = opened()
    filled(runner, 130)
    for start, length in ((96, 32), (128, 3), (32, 64)):
        with pytest.raises(ProviderRuntimeError, match="cannot be read"):
            runner.read_kv(0, start, length)
    assert [part.shape[0] for part in runner.read_kv(0, 128, 2)] == [2] * len(runner.read_kv(0, 0, CHUNK))


def test_a_lost_device_is_an_error(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = opened()
    filled(runner, CHUNK)
    chunk = [part.copy() for part in runner.read_kv(0, 0, CHUNK)]

    def lost(*_: Any) -> None:
        raise ProviderUnavailableError("cudaMemcpyAsync failed: device lost")

    monkeypatch.setattr(threaded(runner).session._stream, "copy", lost)
    with pytest.raises(ProviderRuntimeError, match="KV could not be read: cudaMemcpyAsync failed"):
        runner.read_kv(0, 0, CHUNK)
    with pytest.raises(ProviderRuntimeError, match="KV could not be written: cudaMemcpyAsync failed"):
        runner.write_kv(1, 0, CHUNK, chunk)
    monkeypatch.undo()
    runner.write_kv(1, 0, CHUNK, chunk)
    np.testing.assert_array_equal(logits(runner, 1, CHUNK), logits(runner, 0, CHUNK))


@pytest.mark.long
@pytest.mark.parametrize("provider", [LargeBlocks, LateCudaOnCpu])
def test_evicted_prefixes_come_back_from_host_memory(opened: Open, provider: Any) -> None:
    """More texts than slots, each asked for twice, a step in flight: the tokens are those without tiers."""
    texts = [np.random.default_rng(seed).integers(0, VOCAB, 200).tolist() for seed in range(6)]

    def tokens(swap_bytes: int) -> tuple[list[list[int]], int]:
        runner = opened(provider)
        engine = Engine(runner, EngineConfig(swap_bytes=swap_bytes))
        found = []
        for turn in range(2):
            for number, text in enumerate(texts):
                params = SamplingParams(temperature=0.0, max_tokens=6)
                found += run(engine, [make_request(f"{turn}.{number}", text, params)])
        return found, engine.stats().kv_restored_tokens

    expected, none = tokens(0)
    found, restored = tokens(10**9)
    assert none == 0
    assert restored >= 5 * 192
    assert found == expected
