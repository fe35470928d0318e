"""Lines distributed among workers: every line once, also if workers die."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from batch_kit import GREEDY, NULL, read_lines, spec, write_lines

from carryall.errors import ProviderRuntimeError, UsageError
from carryall.runtime.batch.execute import execute, make_executor, numbered
from carryall.runtime.batch.inputs.lines import COMPLETIONS, BatchLine
from carryall.runtime.batch.jobs.journal import Journal, LineResult
from carryall.runtime.batch.workers.pool import Give, Take, WorkerLost, WorkerPool
from carryall.runtime.batch.workers.processes import ProcessWorker
from carryall.runtime.batch.workers.worker import WorkerSpec


def lines(count: int) -> Iterator[BatchLine]:
    for number in range(1, count + 1):
        yield BatchLine(number, f"line-{number}", COMPLETIONS, {})


class Fake:
    """A worker that answers with its name, and dies on certain lines."""

    def __init__(self, name: str, deadly: Callable[[int], bool] = lambda number: False) -> None:
        self.name = name
        self._deadly = deadly

    def exchange(self, give: Give, take: Take, over: threading.Event) -> None:
        while (found := give(5)) != []:
            for line in found or ():
                time.sleep(random.uniform(0, 0.002))
                if self._deadly(line.number):
                    raise WorkerLost(f"killed by line {line.number}")
                take(
                    [LineResult(number=line.number, digest=b"", record=self.name.encode(), worker=self.name)]
                )

    def close(self) -> None:
        pass


def answers(pool: WorkerPool, given: Iterator[BatchLine]) -> list[LineResult]:
    found = list(pool.run(given, threading.Event()))
    assert [t.name for t in threading.enumerate() if t.name == "carryall-batch-worker"] == []
    return found


def test_every_line_is_answered_once_by_some_worker() -> None:
    found = answers(WorkerPool([lambda: Fake("a"), lambda: Fake("b"), lambda: Fake("c")]), lines(300))
    assert sorted(answer.number for answer in found) == list(range(1, 301))
    assert {answer.worker for answer in found} == {"a", "b", "c"}


def test_workers_that_die_are_replaced_and_their_lines_done_again() -> None:
    once = set(range(10, 300, 7))

    def deadly(number: int) -> bool:
        if number in once:
            once.remove(number)
            return True
        return False

    found = answers(WorkerPool([lambda: Fake("a", deadly), lambda: Fake("b", deadly)]), lines(300))
    assert not once
    assert sorted(answer.number for answer in found) == list(range(1, 301))
    assert {answer.code for answer in found} == {None}


def test_a_line_that_kills_every_worker_fails_and_the_others_do_not() -> None:
    found = answers(WorkerPool([lambda: Fake("a", lambda n: n == 13), lambda: Fake("b")][:1]), lines(40))
    assert sorted(answer.number for answer in found) == list(range(1, 41))
    failed = [answer for answer in found if answer.code]
    assert 13 in {answer.number for answer in failed}
    assert all("workers died" in json.loads(answer.record)["error"]["message"] for answer in failed)
    assert len(failed) <= 5  # the lines given together with it


def test_workers_that_cannot_live_end_the_run() -> None:
    with pytest.raises(ProviderRuntimeError, match="5 workers died in a row: killed by line"):
        answers(WorkerPool([lambda: Fake("a", lambda n: True)]), lines(40))


def test_a_model_that_cannot_be_loaded_ends_the_run_with_its_error() -> None:
    def opener() -> Fake:
        raise UsageError("no such model")

    with pytest.raises(UsageError, match="no such model"):
        answers(WorkerPool([lambda: Fake("a"), opener]), lines(10_000))


def test_an_error_while_reading_ends_the_run() -> None:
    def broken() -> Iterator[BatchLine]:
        yield from lines(20)
        raise OSError("pulled")

    with pytest.raises(OSError, match="pulled"):
        answers(WorkerPool([lambda: Fake("a"), lambda: Fake("b")]), broken())


def test_probes_say_how_far_workers_differ() -> None:
    pool = WorkerPool([lambda: Fake("a"), lambda: Fake("a"), lambda: Fake("b")], probes=True)
    found = answers(pool, lines(200))
    assert sorted(answer.number for answer in found) == list(range(1, 201))
    counts = pool.facts()["agreement"]
    assert {name: each["lines"] for name, each in counts.items()} == {"a": 8, "b": 8}
    assert counts["a"]["equal"] + counts["b"]["equal"] == 8


def test_workers_are_named() -> None:
    assert numbered(["cpu", "openvino", "cpu"]) == [
        ("cpu", "cpu"),
        ("openvino", "openvino"),
        ("cpu", "cpu#2"),
    ]


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


@pytest.mark.long
@pytest.mark.usefixtures("cache")
def test_processes_give_what_one_engine_gives_even_if_one_is_killed(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", [{"prompt": f"p{n}", "max_tokens": 2 + n % 6} for n in range(200)]
    )
    loading = {**NULL, "provider_options": {"step_seconds": 0.02}}  # the first answer is far from the last
    alone, shared = tmp_path / "alone.jsonl", tmp_path / "shared.jsonl"
    execute(spec(source, alone))
    workers: list[ProcessWorker] = []

    class Killing(WorkerPool):
        """Kills the first worker after its first answer."""

        def run(self, lines: Iterator[BatchLine], stop: threading.Event) -> Iterator[LineResult]:
            killed = False
            for answer in super().run(lines, stop):
                if answer.worker == "null" and not killed:
                    killed = True
                    pid = next(worker.pid for worker in workers if worker.name == "null")
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
                yield answer

    def opener(*arguments: Any) -> WorkerPool:
        pool = make_executor(*arguments)
        assert isinstance(pool, WorkerPool)

        def noted(inner: Callable[[], Any]) -> Any:
            workers.append(inner())
            return workers[-1]

        return Killing([functools.partial(noted, inner) for inner in pool._openers])

    job = spec(source, shared, providers=["null", "null"], loading=loading)
    outcome = execute(job, open_executor=opener)
    assert outcome.finished
    assert len(workers) == 3  # the killed one was replaced
    assert shared.read_bytes() == alone.read_bytes()
    journal = Journal(tmp_path / "shared.jsonl.job", read_only=True)
    names = {answer.worker for answer in journal.answers()}
    journal.close()
    assert names == {"null", "null#2"}


@pytest.mark.long
@pytest.mark.usefixtures("cache")
def test_a_worker_reports_why_it_cannot_begin(tmp_path: Path) -> None:
    worker = ProcessWorker(WorkerSpec(model=str(tmp_path), worker="w"))
    try:
        with pytest.raises(UsageError, match="neither a package nor a checkpoint"):
            worker.exchange(lambda count: [], lambda found: None, threading.Event())
    finally:
        worker.close()


@pytest.mark.long
@pytest.mark.usefixtures("cache")
def test_a_script_that_starts_a_batch_when_imported_gets_one_error(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [{"prompt": "p", "max_tokens": 2}])
    script = tmp_path / "script.py"
    script.write_text(
        "from carryall.runtime.batch.execute import execute\n"
        "from carryall.runtime.batch.spec import BatchSpec\n"
        "import sys\n"
        "from pathlib import Path\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "from batch_kit import NULL, spec\n"
        "folder = Path(__file__).parent\n"
        "execute(spec(folder / 'in.jsonl', folder / 'out.jsonl', providers=['null'], loading=NULL))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "before it began" in done.stderr.splitlines()[-1]
    assert "if __name__ == " in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_cpu_and_openvino_generate_the_same_tokens(tmp_path: Path) -> None:
    """Greedy tokens of the embedded model in fp32 do not depend on the worker of a line."""
    prompts: Sequence[str] = ["def f(x):", "class Stack:", "import os\n", "for i in range("]
    source = write_lines(
        tmp_path / "in.jsonl",
        [{"prompt": f"{p} # {n}", "max_tokens": 24} for n in range(16) for p in prompts],
    )
    sampling = {**GREEDY, "max_tokens": 24}
    out, reference = tmp_path / "out.jsonl", tmp_path / "reference.jsonl"
    job = {"sampling": sampling, "loading": {"max_slots": 8}}
    execute(spec(source, out, providers=["cpu", "openvino"], **job))
    execute(spec(source, reference, **job))
    assert out.read_bytes() == reference.read_bytes()
    journal = Journal(tmp_path / "out.jsonl.job", read_only=True)
    agreement = journal.fact("agreement")
    journal.close()
    assert agreement == {"cpu": {"lines": 8, "equal": 8}, "openvino": {"lines": 8, "equal": 8}}
    assert len(read_lines(out)) == 64
