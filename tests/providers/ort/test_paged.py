"""Paged runs on a device, padded to captured forms, with the CPU as the device."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import requests_ahead
from device_stand_ins import PagedCudaOnCpu, threaded
from engine_kit import make_request, run
from late_device import LateCudaOnCpu
from lowered_forms import decoder
from tiny_models import write_tiny

from carryall.errors import ProviderRuntimeError
from carryall.exporter.export import export_model
from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.pipeline import pipeline
from carryall.providers.base import BestLogits, Row, RunnerConfig
from carryall.providers.ort import paged
from carryall.providers.runners.paged_runner import PagedRunner
from carryall.providers.targets import cuda
from carryall.runtime.engine.engine import Engine, EngineConfig

CONTEXT, SLOTS, VOCAB, BEST = 200, 6, 260, 64
Tokens = npt.NDArray[np.int64]


@pytest.fixture(scope="module", params=["qwen3", "gpt2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paged")
    positions: dict[str, Any] = {"gpt2": {"n_positions": CONTEXT}}.get(request.param, {})
    checkpoint = write_tiny(request.param, folder / "checkpoint", **positions)
    config = RunnerConfig(context_length=CONTEXT)
    lowered, _ = pipeline.run(export_model(checkpoint), PagedCudaOnCpu().passes(config))
    save_model(lowered, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    return requests_ahead.compared_draws(monkeypatch)


@pytest.fixture
def opened(model: Path) -> Iterator[Callable[..., Any]]:
    runners = []

    def opener(**options: Any) -> Any:
        config = RunnerConfig(max_slots=SLOTS, context_length=CONTEXT, num_threads=1, options=options)
        runners.append(PagedCudaOnCpu().runner(model, config))
        return runners[-1]

    yield opener
    for runner in runners:
        runner.close()


def session_of(runner: Any) -> Any:
    return threaded(runner).session


def test_decoding_runs_are_captured_when_the_model_is_opened(opened: Callable[..., Any]) -> None:
    forms = session_of(opened()).captured
    assert {form.rows for form in forms if form.query == 1} == {1, 2, 4, 8}
    assert not session_of(opened(cuda_graphs=False)).captured


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_random_steps_have_the_logits_of_runs_of_their_size(opened: Callable[..., Any], seed: int) -> None:
    """Prompts, pieces, single tokens, copied prefixes, shorter slots: the same in both runners."""
    padded, exact = opened(), opened(cuda_graphs=False)
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, VOCAB, CONTEXT) for _ in range(SLOTS)]
    lengths = [0] * SLOTS
    used = set()
    for turn in range(40):
        if turn % 7 == 3:
            source, target = rng.permutation(SLOTS)[:2].tolist()
            kept = int(rng.integers(0, lengths[source] + 1))
            for runner in (padded, exact):
                runner.copy_prefix(source, target, kept)
            texts[target] = texts[source].copy()
            texts[target][kept:] = rng.integers(0, VOCAB, CONTEXT - kept)
            lengths[target] = kept
        rows = []
        single = rng.random() < 0.5
        for slot in rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)].tolist():
            if lengths[slot] == CONTEXT:
                lengths[slot] = int(rng.integers(0, CONTEXT))
            count = 1 if single else int(rng.integers(1, min(40, CONTEXT - lengths[slot]) + 1))
            tokens = texts[slot][lengths[slot] : lengths[slot] + count]
            rows.append(Row(slot, tokens, lengths[slot], num_logits=int(rng.integers(0, 2))))
            lengths[slot] += count
        for one, other in zip(padded.forward(rows), exact.forward(rows), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)
        used |= set(session_of(padded).captured)
    assert {form.query == 1 for form in used} == {True, False}
    assert any(form.longest == 0 for form in used)


def test_the_largest_logits_are_those_of_all(opened: Callable[..., Any]) -> None:
    runner, exact = opened(), opened(cuda_graphs=False)
    rng = np.random.default_rng(3)
    rows = [Row(slot, rng.integers(0, VOCAB, 9 + slot), 0, best_suffice=slot != 1) for slot in range(3)]
    rows.append(Row(3, rng.integers(0, VOCAB, 4), 0, num_logits=0))
    expected = exact.forward([Row(row.slot, row.tokens, 0, num_logits=row.num_logits) for row in rows])
    found = runner.forward_best(rows)
    assert [type(result) is BestLogits for result in found] == [True, False, True, False]
    for result, logits in zip(found, expected, strict=True):
        if not isinstance(result, BestLogits):
            np.testing.assert_allclose(result, logits, atol=2e-5)
            continue
        order = np.argsort(-logits[0], kind="stable")[:BEST]
        np.testing.assert_array_equal(result.token_ids, order)
        np.testing.assert_allclose(result.logits, logits[0, order], atol=2e-5)
        assert result.logsumexp == pytest.approx(np.log(np.exp(logits[0]).sum()), abs=1e-4)
        np.testing.assert_allclose(result.whole(), logits[0], atol=2e-5)


def test_hidden_states_and_many_logits_come_from_runs_that_are_not_captured(
    opened: Callable[..., Any],
) -> None:
    runner, tokens = opened(), np.arange(21)
    before = dict(session_of(runner).captured)
    states = np.full((21, runner.info.embedding_size), np.nan, np.float32)
    runner.forward([Row(0, tokens, 0, last_hidden_states=states)])
    (logits,) = runner.forward([Row(1, tokens, 0, num_logits=21)])
    assert np.isfinite(states).all()
    assert logits.shape == (21, VOCAB)
    assert session_of(runner).captured == before
    (last,) = runner.forward([Row(0, tokens[:1], 20)])  # the former binding has no hidden states
    assert np.isfinite(last).all()


def test_no_more_forms_are_captured_than_memory_is_set_aside_for(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_MOST_FORMS", 5)
    runner, exact = opened(), opened(cuda_graphs=False)
    for size in (3, 30, 100, 150):
        rows = [Row(0, np.arange(size), 0)]
        np.testing.assert_allclose(runner.forward(rows)[0], exact.forward(rows)[0], atol=2e-5)
    assert len(session_of(runner).captured) == 5


def test_requests_have_the_same_tokens_with_and_without_forms(opened: Callable[..., Any]) -> None:
    def tokens(**options: Any) -> list[list[int]]:
        engine = Engine(opened(**options))
        rng = np.random.default_rng(5)
        requests = [
            make_request(f"r{i}", rng.integers(0, VOCAB, int(rng.integers(1, 60))).tolist()) for i in range(9)
        ]
        return run(engine, requests)

    expected = tokens(cuda_graphs=False)
    assert tokens() == expected


def test_padded_runs_with_other_logits_are_not_captured(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that lets padding change the rows is found when the model is opened."""
    fill = paged.OrtPagedSession._fill

    def wrong(self: Any, batch: Any, form: Any, arrays: Any) -> None:
        fill(self, batch, form, arrays)
        arrays["past_seqlens"][0] += 3

    monkeypatch.setattr(paged.OrtPagedSession, "_fill", wrong)
    runner = opened()
    assert "runs are not captured, because padded ones have other logits here" in caplog.text
    assert not session_of(runner).pads
    monkeypatch.undo()
    exact = opened(cuda_graphs=False)
    rows = [Row(0, np.arange(9), 0)]
    np.testing.assert_allclose(runner.forward(rows)[0], exact.forward(rows)[0], atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("moment", [0, 1, 4])
def test_a_failed_run_fails_no_request(opened: Callable[..., Any], moment: int) -> None:
    requests = [make_request(f"r{i}", list(range(1, 9 + i))) for i in range(3)]
    engine = Engine(opened(), EngineConfig(prefix_cache=False, max_step_slowdown=float("inf")))
    expected = run(engine, requests)
    session, runs = session_of(engine.runner), iter(range(10**6))
    real = session.session

    class Faulty:
        def run_with_iobinding(self, *arguments: Any) -> None:
            if next(runs) == moment:
                raise RuntimeError("CUDA error 719: device lost")
            real.run_with_iobinding(*arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    session.session = Faulty()
    again = [make_request(f"again {i}", list(range(1, 9 + i))) for i in range(3)]
    found = run(engine, again)
    assert [str(request.error) for request in again] == ["None"] * 3
    assert found == expected
    assert next(runs) > moment


@pytest.mark.long
def test_a_step_in_flight_gives_the_tokens_of_one_step_at_a_time(
    opened: Callable[..., Any], drawn: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    alone = requests_ahead.results(opened(), steps_ahead=0)
    requests_ahead.results(opened(cuda_graphs=False), steps_ahead=0).check(alone)
    assert not drawn
    requests_ahead.results(opened()).check(alone)
    assert len(drawn) > 30
    assert not any(drawn)
    assert "failed" not in caplog.text


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_device_that_is_late_gives_the_same_tokens(
    model: Path, opened: Callable[..., Any], drawn: list[bool], seed: int
) -> None:
    """Its copies read and write when it comes to them, not when they are asked for."""
    provider = LateCudaOnCpu(seed, seconds=0.001)
    config = RunnerConfig(max_slots=SLOTS, context_length=CONTEXT, num_threads=1)
    late = provider.runner(model, config)
    requests_ahead.results(late).check(requests_ahead.results(opened(), steps_ahead=0))
    assert provider.streams[0].most > 5  # work of two steps
    assert len(drawn) > 30
    assert not any(drawn)
    late.close()
    provider.streams[0].end()


@pytest.mark.long
@pytest.mark.parametrize("moment", [1, 4, 9])
def test_a_run_that_fails_late_fails_no_request(
    model: Path,
    opened: Callable[..., Any],
    moment: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The step after it fails too; their rows run one by one. The fault of a single row would be final."""
    provider, ahead = LateCudaOnCpu(moment, seconds=0.0005), iter(range(1, 10**6))
    config = RunnerConfig(max_slots=SLOTS, context_length=CONTEXT, num_threads=1)
    late = provider.runner(model, config)
    submit = PagedRunner.submit

    def faulty(self: Any, rows: Any) -> Any:
        session = provider.sessions[0]
        if len(rows) > 2 and self._flying and self is threaded(late) and next(ahead) == moment:
            number = session.runs
            session.faulty = lambda count: count == number
        return submit(self, rows)

    monkeypatch.setattr(PagedRunner, "submit", faulty)
    requests_ahead.results(late).check(requests_ahead.results(opened(), steps_ahead=0))
    assert "launch failure" in caplog.text
    late.close()
    provider.streams[0].end()


@pytest.mark.long
@pytest.mark.parametrize("kv_cache", ["int8", "fp8"])
def test_a_cache_of_8_bits_takes_a_quarter_of_the_memory_and_gives_the_same_texts_in_forms(
    kv_cache: str, tmp_path: Path
) -> None:
    model, exact = decoder("qwen3", "int8-kv", tmp_path), decoder("qwen3", "float", tmp_path)
    config = RunnerConfig(max_slots=SLOTS, context_length=64, num_threads=1, options={"kv_cache": kv_cache})
    found, sizes = list[Any](), list[int]()
    for graph, options in (
        (model, {"kv_cache": kv_cache}),
        (model, {"kv_cache": kv_cache, "cuda_graphs": False}),
        (exact, {}),
    ):
        chosen = dataclasses.replace(config, options=options)
        lowered, _ = pipeline.run(graph.clone(), PagedCudaOnCpu().passes(chosen))
        folder = tmp_path / str(len(sizes))
        folder.mkdir()
        save_model(lowered, folder / "model.onnx")
        runner = PagedCudaOnCpu().runner(folder / "model.onnx", chosen)
        sizes.append(runner.info.kv_bytes_per_token)
        rng = np.random.default_rng(5)
        prompts = [rng.integers(0, 250, int(rng.integers(1, 40))).tolist() for _ in range(6)]
        requests = [make_request(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
        found.append(run(Engine(runner), requests))
        runner.close()
    assert found[0] == found[1] != found[2]
    assert sizes[0] == sizes[1] == sizes[2] // 4


@pytest.mark.long
def test_too_little_memory_is_an_error(opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One block holds no sequence, as another is for padding; logits take memory too."""
    each, said = 16 * opened().info.kv_bytes_per_token, list[str]()
    for free in itertools.count(each // 2, each // 2):
        monkeypatch.setattr(PagedCudaOnCpu, "free_memory", lambda self, options, free=free: free)
        try:
            runner = opened(cuda_graphs=False)
            break
        except ProviderRuntimeError as error:
            said.append(str(error))
    assert len(said) > 1
    parts = (
        r"the device has no memory for KV: two blocks of 16 tokens take \S+ kB",
        r"; memory_fraction allows \S+ kB, of which captured runs, logits and adapters take \S+ kB",
        r"\. Close other models, lower max_slots, .*",
    )
    assert all(re.fullmatch("".join(parts), message) for message in said)
    assert (runner.info.max_slots, runner.info.kv_tokens) == (1, 16)


def test_short_memory_has_two_blocks_for_each_slot(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block of a slot may be partly empty, and so many are kept free."""
    each = 16 * opened().info.kv_bytes_per_token
    monkeypatch.setattr(PagedCudaOnCpu, "free_memory", lambda self, options: 7 * each)
    info = opened(cuda_graphs=False, memory_fraction=1.0).info
    assert info.max_slots < SLOTS
    assert info.kv_tokens >= 16 * info.max_slots - 16


def test_memory_for_all_contexts_has_all_slots(model: Path) -> None:
    """A context of one block needs no second one."""
    config = RunnerConfig(max_slots=SLOTS, context_length=16, num_threads=1)
    runner = PagedCudaOnCpu().runner(model, config)
    assert (runner.info.max_slots, runner.info.kv_tokens) == (SLOTS, None)
    runner.close()
