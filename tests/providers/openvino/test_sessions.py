"""Paged runs of OpenVINO that select logits and draw tokens, one step in flight, on its CPU device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import requests_ahead
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.pipeline.pipeline import run
from carryall.providers import get_provider
from carryall.providers.base import BestLogits, Row, RunnerConfig

pytest.importorskip("openvino")
from carryall.providers.openvino import sessions

AHEAD = {"top_logits": 64, "steps_ahead": 1}
CONTEXT, SLOTS, VOCAB = 200, 6, 260


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    model, runners = export_model(write_tiny("qwen3", tmp_path / "checkpoint")), list[Any]()
    target = get_provider("openvino")

    def opener(**options: Any) -> Any:
        folder = tmp_path / str(len(runners))
        folder.mkdir()
        config = RunnerConfig(max_slots=SLOTS, context_length=CONTEXT, num_threads=1, options=options)
        save_model(run(model.clone(), target.passes(config))[0], folder / "model.onnx")
        runners.append(target.runner(folder / "model.onnx", config))
        return runners[-1]

    yield opener
    for runner in runners:
        runner.close()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    return requests_ahead.compared_draws(monkeypatch)


def test_the_cpu_selects_no_logits_and_takes_no_step_ahead(opened: Callable[..., Any]) -> None:
    info = opened().info
    assert (info.top_logits, info.steps_ahead, info.num_tokens) == (0, 0, VOCAB)
    info = opened(**AHEAD).info
    assert (info.top_logits, info.steps_ahead, info.num_tokens) == (64, 1, VOCAB)


def test_another_device_does_both(opened: Callable[..., Any]) -> None:
    passes = get_provider("openvino").passes(RunnerConfig(context_length=CONTEXT, options={"device": "GPU"}))
    assert [type(one).__name__ for one in passes[-2:]] == ["TopLogitsPass", "DrawTokensPass"]


@pytest.mark.long
def test_a_step_in_flight_gives_the_tokens_of_one_step_at_a_time(
    opened: Callable[..., Any], drawn: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    alone = requests_ahead.results(opened(), steps_ahead=0)
    requests_ahead.results(opened(top_logits=64), steps_ahead=0).check(alone)
    assert not drawn
    requests_ahead.results(opened(**AHEAD)).check(alone)
    assert len(drawn) > 30
    assert not any(drawn)
    assert "failed" not in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("moment", [1, 4, 9])
def test_a_run_that_fails_in_flight_fails_no_request(
    opened: Callable[..., Any],
    moment: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The step after it fails too; their rows run one by one."""
    alone, flights = requests_ahead.results(opened(), steps_ahead=0), iter(range(1, 10**6))
    infer, begin = sessions._Request.infer, sessions.OpenVinoPagedSession.begin
    faulty: list[Any] = []

    def failing(self: Any) -> None:
        if self in faulty:
            faulty.remove(self)
            raise RuntimeError("the device is lost")
        infer(self)

    def begun(self: Any, batch: Any) -> Any:
        if batch.sources is not None and next(flights) == moment:
            faulty.append(self._requests[-1])
        return begin(self, batch)

    monkeypatch.setattr(sessions._Request, "infer", failing)
    monkeypatch.setattr(sessions.OpenVinoPagedSession, "begin", begun)
    requests_ahead.results(opened(**AHEAD)).check(alone)
    assert not faulty
    assert "the device is lost" in caplog.text


def test_a_step_is_computed_while_the_caller_goes_on(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, infer = opened(**AHEAD), sessions._Request.infer
    allowed, tokens = threading.Event(), np.arange(9)

    def later(self: Any) -> None:
        assert allowed.wait(60)
        infer(self)

    monkeypatch.setattr(sessions._Request, "infer", later)
    first = runner.submit([Row(0, tokens, 0)])
    second = runner.submit([Row(1, tokens, 0)])  # a run waits for ``allowed``, so none is done
    allowed.set()
    np.testing.assert_array_equal(first.wait()[0], second.wait()[0])


def test_equal_logits_are_ordered_by_token_id(opened: Callable[..., Any], tmp_path: Path) -> None:
    """As ONNX specifies; OpenVINO's own TopK leaves the order open."""
    model = export_model(write_tiny("qwen3", tmp_path / "ties", tie_word_embeddings=False))
    head = next(value for name, value in model.graph.initializers.items() if "lm_head" in name)
    assert head.const_value is not None
    weights = head.const_value.numpy().copy()
    wide = weights if weights.shape[-1] == VOCAB else weights.T
    wide[:, 1::2] = wide[:, ::2]
    head.const_value = ir.tensor(weights)
    target, config = get_provider("openvino"), RunnerConfig(context_length=CONTEXT, options=AHEAD)
    save_model(run(model, target.passes(config))[0], tmp_path / "model.onnx")
    runner = target.runner(tmp_path / "model.onnx", config)
    (best,) = runner.forward_best([Row(0, np.arange(9), 0, best_suffice=True)])
    assert isinstance(best, BestLogits)
    whole = best.whole()
    np.testing.assert_array_equal(whole[::2], whole[1::2])
    np.testing.assert_array_equal(best.token_ids, np.argsort(-whole, kind="stable")[:64])
    runner.close()
