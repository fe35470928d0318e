"""Engines whose runner returns only the best logits give the same tokens as from all logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from device_stand_ins import CudaOnCpu
from engine_kit import VOCAB, make_request, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import write_tiny

from carryall.errors import ProviderUnavailableError
from carryall.exporter.export import export_model
from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.pipeline import pipeline
from carryall.providers.base import RunnerConfig
from carryall.providers.native import best_draws
from carryall.providers.ort.slot_memory import SlotBinding
from carryall.providers.targets.null import NullOptions, NullRunner
from carryall.runtime.engine.engine import Engine
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.requests.request_group import RequestGroup
from carryall.runtime.types.sampling_params import SamplingParams

MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"top_k": 5, "logprobs": 5},
    {"top_p": 0.5, "temperature": 0.7},
    {"top_p": 0.99, "temperature": 1.5},
    {"min_p": 0.2},
    {},
    {"temperature": 0.0, "prompt_logprobs": 1},
]


def requests(options: Sequence[dict[str, Any]], seed: int = 0) -> list[Request]:
    return [
        make_request(f"r{i}", 3 + i, SamplingParams(max_tokens=6, seed=seed + i, **each))
        for i, each in enumerate(options)
    ]


def outcome(request: Request) -> tuple[list[int], Any]:
    completion = RequestGroup(request.params, [request]).output().outputs[0]
    logprobs = completion.logprobs
    return completion.token_ids, logprobs and [
        {token: (round(p.logprob, 3), p.rank) for token, p in each.items()} for each in logprobs
    ]


def null_engine(top_logits: int) -> tuple[Engine, NullRunner]:
    config = RunnerConfig(max_slots=4, context_length=64)
    runner = NullRunner(config, NullOptions(vocab_size=VOCAB, top_logits=top_logits))
    return Engine(runner), runner


option_sets = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.integers(0, 40),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 0.5),
        "typical_p": st.just(0.7),
        "presence_penalty": st.sampled_from([-0.5, 0.5]),
        "repetition_penalty": st.sampled_from([0.9, 1.2]),
        "min_tokens": st.just(3),
        "logprobs": st.integers(0, 5),
    },
)


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(st.lists(option_sets, min_size=1, max_size=6), st.integers(0, 1000))
def test_equal_on_the_toy_model(options: list[dict[str, Any]], seed: int) -> None:
    results = []
    for top_logits in (0, 16):
        engine, _ = null_engine(top_logits)
        batch = requests(options, seed)
        run(engine, batch)
        results.append([outcome(request) for request in batch])
    assert results[0] == results[1]


def test_only_what_needs_all_logits_asks_for_them() -> None:
    engine, runner = null_engine(16)
    some: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 16}, {"temperature": 0.01}]
    some.append({"temperature": 0.7, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.05})
    run(engine, requests(some))
    assert runner.downloads == 0
    run(engine, requests([{"top_p": 0.9, "temperature": 3.0}]))
    assert runner.downloads == 6


def test_a_damaged_library_is_refused_before_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged() -> Path:
        raise ProviderUnavailableError("the CPU kernels are damaged")

    monkeypatch.setattr(best_draws, "find_library", damaged)
    best_draws.best_draws.cache_clear()
    for top_logits in (0, 16):
        with pytest.raises(ProviderUnavailableError, match="are damaged"):
            null_engine(top_logits)


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return the graphs for the test device, without and with the best logits."""
    folder = tmp_path_factory.mktemp("best")
    checkpoint, paths = write_tiny("llama", folder / "checkpoint"), {}
    for count in (0, 16):
        config = RunnerConfig(context_length=64, options={"top_logits": count})
        graph, _ = pipeline.run(export_model(checkpoint), CudaOnCpu().passes(config))
        paths[count] = folder / str(count) / "model.onnx"
        paths[count].parent.mkdir()
        save_model(graph, paths[count])
    return paths


def device_engine(path: Path) -> Engine:
    return Engine(CudaOnCpu().runner(path, RunnerConfig(max_slots=4, context_length=64, num_threads=1)))


def test_equal_on_a_device(lowered: dict[int, Path]) -> None:
    results = []
    for count, path in lowered.items():
        engine = device_engine(path)
        assert engine.info.top_logits == count
        batch = requests(MIXED)
        run(engine, batch)
        assert not any(request.error for request in batch)
        results.append([outcome(request) for request in batch])
        engine.close()
    assert results[0] == results[1]


def test_all_logits_cross_the_bus_on_demand_only(
    lowered: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    fetch = SlotBinding.fetch

    def counted(bound: SlotBinding, name: str) -> None:
        fetched.append(name)
        fetch(bound, name)

    monkeypatch.setattr(SlotBinding, "fetch", counted)
    engine = device_engine(lowered[16])
    run(engine, requests([{"temperature": 0.0}, {"top_k": 4}]))
    assert "logits" not in fetched
    assert "top_logits" in fetched
    run(engine, requests([{}]))
    assert "logits" in fetched
    engine.close()


def test_a_failed_download_fails_its_request_only(
    lowered: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = device_engine(lowered[16])
    fetch = SlotBinding.fetch

    def lost(bound: SlotBinding, name: str) -> None:
        if name == "logits":
            raise RuntimeError("device lost")
        fetch(bound, name)

    monkeypatch.setattr(SlotBinding, "fetch", lost)
    wide, greedy = requests([{"top_p": 0.999, "temperature": 3.0}, {"temperature": 0.0}])
    run(engine, [wide, greedy])
    assert "logits could not be downloaded: device lost" in str(wide.error)
    assert (greedy.finish_reason, len(greedy.output_token_ids)) == ("length", 6)
    engine.close()
