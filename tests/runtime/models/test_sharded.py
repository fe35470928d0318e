"""Models over several processes give the tokens of the whole model, and serve on when one of them ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import psutil
import pytest

from carryall import LLM, SamplingParams
from carryall.errors import CarryallWarning, ProviderRuntimeError, UsageError
from carryall.providers.base import Row
from carryall.providers.native.library import find_library
from carryall.providers.numa import NumaNode
from carryall.providers.runners.runner_process import RunnerProcess
from carryall.providers.runners.sharded_runner import ShardedRunner
from carryall.runtime.models import sharded
from carryall.runtime.models.loading import load_model

pytestmark = [
    pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built"),
    pytest.mark.skipif(sys.platform == "win32", reason="ranks need POSIX"),
]

PROMPTS = ["def add(a, b):", "class Point:\n    def __init__(self", "import os"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.long
@pytest.mark.parametrize("quantize", [pytest.param(None, marks=pytest.mark.slow), "int4"])
def test_ranks_give_the_tokens_of_the_whole_model(quantize: str | None) -> None:
    options: dict[str, Any] = {"max_slots": 4, "quantize": quantize, "num_threads": 1}
    with LLM("draft", **options) as whole:
        expected = tokens(whole)
    with LLM("draft", tensor_parallel=2, speculative="prompt-lookup", **options) as llm:
        assert [tokens(llm) for _ in range(2)] == [expected] * 2  # the second time from the prefix cache


@pytest.mark.long
def test_requests_are_computed_again_when_a_rank_ends() -> None:
    loaded = load_model("draft", tensor_parallel=2, max_slots=4, num_threads=1)
    runner = loaded.runner
    assert isinstance(runner, ShardedRunner)
    with LLM(loaded) as llm:
        expected = tokens(llm)
        second = runner.ranks[1].pid
        os.kill(second, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (second, signal.SIGKILL)).start()
        assert tokens(llm) == expected  # prefixes in the slots were lost
        assert runner.ranks[1].pid != second
        assert llm.stats().preemptions == len(PROMPTS)
        os.kill(runner.ranks[0].pid, signal.SIGKILL)
        assert tokens(llm) == expected  # it ended between steps


@pytest.mark.long
def test_a_request_that_ends_a_rank_each_time_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model("draft", tensor_parallel=2, max_slots=4, num_threads=1)
    runner = loaded.runner
    assert isinstance(runner, ShardedRunner)
    forward, deadly, ended = runner.forward, 77, 0

    def fatal_begin(rank: RunnerProcess, *message: Any) -> None:
        # Killed before the step, the rank would be started again and the step would succeed.
        os.kill(rank.pid, signal.SIGSTOP)
        RunnerProcess.begin(rank, *message)
        os.kill(rank.pid, signal.SIGKILL)

    def fatal(rows: Sequence[Row]) -> Any:
        nonlocal ended
        if any(deadly in row.tokens for row in rows):
            runner.read_kv(0, 0, 0)  # starts the ranks that have ended
            monkeypatch.setattr(runner.ranks[0], "begin", partial(fatal_begin, runner.ranks[0]))
            ended += 1
        return forward(rows)

    monkeypatch.setattr(runner, "forward", fatal)
    with LLM(loaded) as llm:
        with pytest.warns(CarryallWarning, match="the request of prompt 1 failed"):
            outputs = llm.generate([[5, 6, 7], [5, deadly]], GREEDY)
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error"]
        with pytest.raises(ProviderRuntimeError, match="rank 0 of 2"):
            outputs[1].check()
        assert ended == 4  # with others in a step, three times; then alone


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"provider": "cpu:0-0,cpu:1-2"}, "needs a provider that adds up over processes"),
        ({"provider": "auto"}, "needs a provider that adds up over processes"),
        ({"provider": "null"}, "needs a provider that adds up over processes"),
        ({"max_loras": 1}, "cannot be combined with LoRA adapters"),
        ({"provider_options": {"kernels": "onnxruntime"}}, "needs carryall's kernels"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"tensor_parallel": 1, "numa": "auto"}, "numa binds the processes of tensor_parallel"),
        (
            {"tensor_parallel": 7},
            "cannot be cut over 7 processes: Attention .* which 7 ranks cannot share equally",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        load_model("draft", **{"tensor_parallel": 2, "max_slots": 2, **options})


def test_a_model_over_processes_computes_no_embeddings() -> None:
    loaded = load_model("draft", tensor_parallel=2, max_slots=2, num_threads=1)
    assert loaded.open_encoder is not None
    try:
        with pytest.raises(UsageError, match="cannot compute embeddings"):
            loaded.open_encoder()
    finally:
        loaded.runner.close()


@pytest.mark.long
def test_ranks_are_bound_to_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes with the same processors: a machine with one can show no more."""
    cpus = frozenset([min(os.sched_getaffinity(0))])
    monkeypatch.setattr(sharded, "numa_nodes", lambda: [NumaNode(0, cpus), NumaNode(0, cpus)])
    loaded = load_model("draft", tensor_parallel=2, numa="auto", max_slots=2, num_threads=1)
    runner = loaded.runner
    assert isinstance(runner, ShardedRunner)
    try:
        assert [psutil.Process(rank.pid).cpu_affinity() for rank in runner.ranks] == [[*cpus]] * 2
    finally:
        runner.close()
