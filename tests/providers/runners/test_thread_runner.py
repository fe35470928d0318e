"""A runner in a thread of its own, on the toy model of the provider ``null``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from async_runner import AsyncRunner
from engine_kit import make_request, run

from carryall.errors import ProviderRuntimeError
from carryall.providers.base import BestLogits, Row, Runner, RunnerConfig
from carryall.providers.runners.thread_runner import ThreadRunner
from carryall.providers.targets.null import NullProvider
from carryall.runtime.engine.engine import Engine


def toy(**options: Any) -> Any:
    return NullProvider().runner(_ABSENT, RunnerConfig(max_slots=4, context_length=64, options=options))


_ABSENT = Path("no-model.onnx")  # the toy model needs no file


class Witnessed:
    """Pass calls on to a runner, and note the threads that make them."""

    def __init__(self, runner: Any) -> None:
        self._runner, self.threads = runner, set[str]()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._runner, name)
        if not callable(value):
            return value

        def called(*arguments: Any) -> Any:
            self.threads.add(threading.current_thread().name)
            return value(*arguments)

        return called


def test_every_call_of_any_thread_is_made_in_one_thread() -> None:
    opened = []

    def open_runner() -> Any:
        opened.append(Witnessed(toy(top_logits=4)))
        return opened[0]

    runner = ThreadRunner(open_runner)

    def use() -> None:
        runner.forward([Row(0, np.arange(5), 0)])
        (best,) = runner.forward_best([Row(0, np.array([5]), 5, best_suffice=True)])
        assert isinstance(best, BestLogits)
        assert len(best.whole()) == runner.info.vocab_size
        runner.submit([Row(1, np.arange(4), 0)]).wait()
        runner.copy_prefix(0, 2, 3)
        runner.release(0)

    for _ in range(2):
        caller = threading.Thread(target=use)
        caller.start()
        caller.join()
    use()
    runner.close()
    assert opened[0].threads == {"device"}


def test_its_results_are_those_of_the_runner() -> None:
    def tokens(wrap: Callable[[Runner], Runner]) -> list[list[int]]:
        engine = Engine(wrap(toy(top_logits=4)))
        found = run(engine, [make_request(f"r{i}", list(range(1, 6 + i))) for i in range(6)])
        engine.close()
        return found

    assert tokens(lambda runner: ThreadRunner(lambda: runner)) == tokens(lambda runner: runner)


def test_a_step_ahead_passes_through() -> None:
    inner = AsyncRunner(toy(top_logits=4), seconds=0.002)
    engine = Engine(ThreadRunner(lambda: inner))
    found = run(engine, [make_request(f"r{i}", list(range(1, 6 + i))) for i in range(3)])
    engine.close()
    expected = Engine(toy(top_logits=4))
    assert found == run(expected, [make_request(f"r{i}", list(range(1, 6 + i))) for i in range(3)])
    assert inner.overlaps > 0
    assert inner.misuse == []


def test_errors_are_raised_in_the_caller_and_the_thread_goes_on() -> None:
    runner = ThreadRunner(toy)
    with pytest.raises(ProviderRuntimeError):
        runner.forward([Row(0, np.arange(5), 9)])
    runner.forward([Row(0, np.arange(5), 0)])
    runner.close()


def test_a_runner_that_cannot_be_opened_leaves_no_thread() -> None:
    def fail() -> Runner:
        raise ProviderRuntimeError("no memory")

    before = threading.active_count()
    with pytest.raises(ProviderRuntimeError, match="no memory"):
        ThreadRunner(fail)
    _wait_for(lambda: threading.active_count() == before)


def test_a_closed_or_dropped_runner_leaves_no_thread() -> None:
    before = threading.active_count()
    runner = ThreadRunner(toy)
    runner.close()
    runner.close()
    assert threading.active_count() == before
    assert runner.kv_bytes == 0
    with pytest.raises(ProviderRuntimeError, match="the runner is closed"):
        runner.forward([Row(0, np.arange(5), 0)])
    dropped = ThreadRunner(toy)
    del dropped
    _wait_for(lambda: threading.active_count() == before)


def _wait_for(condition: Callable[[], bool], steps: Sequence[float] = (0.01,) * 200) -> None:
    ticks = threading.Event()
    assert any(condition() or ticks.wait(step) for step in steps)
