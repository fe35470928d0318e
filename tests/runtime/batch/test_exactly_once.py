"""Every line is answered exactly once: jobs resume, reject changes, and survive any number of kills."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_kit import Record, Recorder, read_lines, run, spec, toy_worker, write_lines

from carryall.errors import OutputExistsError, PackageError, UsageError
from carryall.exporter.demo import demo_path
from carryall.exporter.export import export_package
from carryall.runtime.batch import execute as execute_module
from carryall.runtime.batch.identity import model_identity, model_stamp
from carryall.runtime.batch.inputs.lines import BatchLine
from carryall.runtime.batch.jobs import writer
from carryall.runtime.batch.jobs.job import JobChangedError
from carryall.runtime.batch.jobs.journal import Journal, LineResult

PROMPTS: list[Record] = [{"prompt": f"p{n}", "max_tokens": 2 + n % 5} for n in range(40)]


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setattr(writer, "COMMIT_SECONDS", 0.01)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", PROMPTS)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def stop_after(answers: int, folder: Path) -> tuple[Any, threading.Event, list[Recorder]]:
    """Return an opener of executors that stop the job after this many answers."""
    stop, made = threading.Event(), list[Recorder]()

    def after(count: int) -> None:
        if count == answers:
            stop.set()

    def opener(job: Any, label: str, created: int, progress: Any) -> Recorder:
        made.append(Recorder(toy_worker(folder), after))
        return made[-1]

    return opener, stop, made


def test_the_output_has_one_line_for_each_of_the_input_in_its_order(source: Path, out: Path) -> None:
    outcome = run(spec(source, out))
    assert outcome.finished
    assert [r["custom_id"] for r in read_lines(out)] == [f"line-{n}" for n in range(1, 41)]
    lengths = [r["response"]["body"]["usage"]["completion_tokens"] for r in read_lines(out)]
    assert lengths == [2 + n % 5 for n in range(40)]
    assert not (out.parent / "out.errors.jsonl").exists()


def test_a_stopped_job_goes_on_by_itself_and_does_only_the_rest(
    tmp_path: Path, source: Path, out: Path
) -> None:
    opener, stop, _ = stop_after(12, tmp_path)
    outcome = run(spec(source, out), open_executor=opener, stop=stop)
    assert not outcome.finished
    assert not out.exists()
    answered = outcome.totals.answered
    assert 12 <= answered < 40
    opener, _, made = stop_after(10**9, tmp_path)
    outcome = run(spec(source, out), open_executor=opener)
    assert outcome.finished
    assert outcome.answered_before == answered
    assert len(made[0].numbers) == 40 - answered
    other = tmp_path / "other.jsonl"
    run(spec(source, other))
    assert [r["custom_id"] for r in read_lines(out)] == [r["custom_id"] for r in read_lines(other)]
    texts = [[r["response"]["body"]["choices"] for r in read_lines(path)] for path in (out, other)]
    assert texts[0] == texts[1]


def test_a_finished_job_does_nothing(source: Path, out: Path) -> None:
    run(spec(source, out))
    before = out.stat()

    def never(*_: Any) -> Any:
        raise AssertionError("the model was loaded")

    outcome = run(spec(source, out), open_executor=never)
    assert outcome.finished
    assert outcome.answered_before == 40
    assert out.stat().st_mtime_ns == before.st_mtime_ns
    out.unlink()
    assert run(spec(source, out), open_executor=never).finished
    assert len(read_lines(out)) == 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": {"max_tokens": 5, "temperature": 0, "ignore_eos": True}}, "options.max_tokens: 4 -> 5"),
        ({"seed": 1}, "options.seed: 0 -> 1"),
        ({"endpoint": "/v1/completions"}, 'options.endpoint: none -> "/v1/completions"'),
        ({"loading": {"provider": "null", "context_length": 64}}, "options.context_length: none -> 64"),
        ({"model": "pydraft"}, "model.weights: "),
    ],
)
def test_another_option_or_model_is_refused_with_the_difference(
    source: Path, out: Path, change: Record, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "model" in change:
        identities = {"demo": {"weights": "a"}, "pydraft": {"weights": "b"}}
        monkeypatch.setattr(execute_module, "model_identity", lambda model, **_: identities[model])
        monkeypatch.setattr(execute_module, "model_stamp", lambda model: ())
    run(spec(source, out))
    before = out.read_bytes()
    with pytest.raises(JobChangedError, match="--restart") as error:
        run(spec(source, out, **change))
    assert message in str(error.value)
    assert out.read_bytes() == before
    assert run(spec(source, out, **change), restart=True).answered_before == 0


def test_an_edited_input_is_refused_with_the_first_line_that_changed(source: Path, out: Path) -> None:
    run(spec(source, out))
    write_lines(source, [*PROMPTS[:7], {"prompt": "new"}, *PROMPTS[7:]])
    with pytest.raises(
        JobChangedError, match=r"input.rows: 40 -> 41.*33 of the answered lines changed; the first is line 8"
    ):
        run(spec(source, out))
    write_lines(source, [*PROMPTS, {"prompt": "new"}])
    with pytest.raises(JobChangedError, match="the 40 answered lines are unchanged"):
        run(spec(source, out))
    assert run(spec(source, out), restart=True).totals.completed == 41
    assert len(read_lines(out)) == 41


def test_a_moved_input_and_another_provider_go_on(tmp_path: Path, source: Path, out: Path) -> None:
    opener, stop, _ = stop_after(5, tmp_path)
    run(spec(source, out), open_executor=opener, stop=stop)
    moved = source.rename(tmp_path / "moved.jsonl")
    outcome = run(spec(moved, out, loading={"provider": "cpu", "num_threads": 1}))
    assert outcome.finished
    assert outcome.answered_before >= 5


def test_a_file_that_is_no_output_of_the_job_is_not_replaced(source: Path, out: Path) -> None:
    out.write_text("precious")
    with pytest.raises(OutputExistsError, match=r"no job in .* wrote it; --restart"):
        run(spec(source, out))
    assert out.read_text() == "precious"
    assert not out.with_name("out.jsonl.job").exists()
    assert run(spec(source, out), restart=True).finished


def test_an_output_that_appears_during_the_job_is_not_replaced(
    tmp_path: Path, source: Path, out: Path
) -> None:
    opener, stop, _ = stop_after(5, tmp_path)
    run(spec(source, out), open_executor=opener, stop=stop)
    out.write_text("precious")
    with pytest.raises(OutputExistsError, match=r"no job in .* wrote it"):
        run(spec(source, out))
    assert out.read_text() == "precious"


def test_an_interrupted_restart_may_still_replace_the_output(tmp_path: Path, source: Path, out: Path) -> None:
    run(spec(source, out))
    opener, stop, _ = stop_after(5, tmp_path)
    assert not run(spec(source, out, seed=1), open_executor=opener, stop=stop, restart=True).finished
    assert run(spec(source, out, seed=1)).finished


@pytest.mark.long
def test_a_second_process_is_kept_out_and_a_dead_one_is_not(tmp_path: Path, source: Path, out: Path) -> None:
    began, end = multiprocessing.Event(), multiprocessing.Event()

    def hold() -> None:
        def opener(*_: Any) -> Any:
            began.set()
            end.wait()

        run(spec(source, out), open_executor=opener)

    process = multiprocessing.get_context("fork").Process(target=hold, daemon=True)
    process.start()
    assert began.wait(60)
    with pytest.raises(UsageError, match=f"process {process.pid} on .* works on the job"):
        run(spec(source, out))
    with pytest.raises(UsageError, match=r"works on the output .*out\.jsonl"):
        run(spec(source, out, job=str(tmp_path / "elsewhere")))
    process.kill()
    process.join()
    assert run(spec(source, out)).finished  # the lock was freed with its process


def test_an_input_edited_while_the_job_waits_is_noticed_line_by_line(source: Path, out: Path) -> None:
    run(spec(source, out))
    journal = Journal(out.with_name("out.jsonl.job"))
    journal.state_facts({"state": "new"})
    journal._db.execute("UPDATE answers SET digest = x'00' WHERE number = 3")
    journal._db.execute("DELETE FROM answers WHERE number = 9")
    journal.state_facts({"totals": {"completed": 39}})
    journal.close()
    with pytest.raises(UsageError, match="line 3 of the input differs from the line"):
        run(spec(source, out))


class Instant:
    """An executor that answers every line immediately, without a model."""

    def run(self, lines: Iterator[BatchLine | None], stop: threading.Event) -> Iterator[LineResult]:
        for line in lines:
            assert line is not None
            yield LineResult(number=line.number, digest=line.digest, id_key=line.id_key, record=b"{}")

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def peak_bytes(tmp_path: Path, lines: int) -> int:
    source = tmp_path / f"{lines}.jsonl"
    with source.open("w") as stream:
        for number in range(lines):
            stream.write(json.dumps({"prompt": "x", "custom_id": f"{number:0600}"}) + "\n")
    tracemalloc.start()
    try:
        outcome = run(spec(source, tmp_path / f"{lines}.out"), open_executor=lambda *_: Instant())
        assert outcome.totals.completed == lines
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.long
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peak_bytes(tmp_path, 100)  # import everything that is imported once
    # 6,000 more custom_ids of 600 characters would be 3.6 MB. The peak itself varies by 0.7 MB.
    assert peak_bytes(tmp_path, 8_000) < peak_bytes(tmp_path, 2_000) + 1_000_000


def package(folder: Path, seed: int) -> Path:
    """Return a file that stands in for a model."""
    folder.mkdir(exist_ok=True)
    (folder / "weights").write_bytes(bytes([seed]) * 64)
    return folder


def test_a_package_replaced_under_the_job_ends_it_with_what_is_answered(
    tmp_path: Path, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = package(tmp_path / "model", 1)
    monkeypatch.setattr(
        execute_module,
        "model_identity",
        lambda name, **_: {"weights": (model / "weights").read_bytes().hex()},
    )
    monkeypatch.setattr(execute_module, "model_stamp", lambda name: (model / "weights").stat().st_mtime_ns)

    def opener(*_: Any) -> Recorder:
        def after(count: int) -> None:
            if count == 10:
                time.sleep(0.1)  # so that some answers are committed
                package(model, 2)

        return Recorder(toy_worker(tmp_path), after)

    job = spec(source, out, model=str(model))
    with pytest.raises(PackageError, match="was replaced while the job ran"):
        run(job, open_executor=opener)
    assert not out.exists()
    with pytest.raises(JobChangedError, match=r"model\.weights: "):
        run(job)
    package(model, 1)
    outcome = run(job)
    assert outcome.finished
    assert 0 < outcome.answered_before < 40


def test_the_identity_of_a_model_is_its_content(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    export_package(demo_path("pycoder"), first)
    shutil.copytree(first, second)
    assert model_identity(str(first)) == model_identity(str(second))
    assert model_stamp(str(first)) != model_stamp(str(second))
    source = shutil.copytree(demo_path("pycoder"), tmp_path / "changed")
    (source / "generation_config.json").write_text('{"temperature": 0.5}')
    shutil.rmtree(second)
    export_package(source, second)
    before, after = model_identity(str(first)), model_identity(str(second))
    assert {name for name in after if after[name] != before.get(name)} == {"generation_config.json"}


MIXED: list[Record | str] = [
    *[{"prompt": f"p{n}", "temperature": 1.0, "max_tokens": 3 + n % 9} for n in range(150)],
    "{torn",
    {"custom_id": "same", "prompt": "a"},
    {"custom_id": "same", "prompt": "b"},
    *[{"messages": [{"role": "user", "content": f"m{n}"}]} for n in range(50)],
    {"prompt": "x", "max_tokens": -3},
]


def worked_to_the_end(source: Path, out: Path, delay: float | None) -> bool:
    """Run the job in a process that is killed after a while; return whether the job had ended."""

    def work() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        run(spec(source, out))
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(delay)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def kill_repeatedly(tmp_path: Path, kills: int) -> None:
    source = write_lines(tmp_path / "mixed.jsonl", MIXED)
    reference = tmp_path / "reference.jsonl"
    run(spec(source, reference))
    whole = [reference.read_bytes(), (tmp_path / "reference.errors.jsonl").read_bytes()]
    assert [data.count(b"\n") for data in whole] == [201, 3]
    out = tmp_path / "out.jsonl"
    random.seed(kills)
    killed, compared = 0, 0
    while killed < kills or not compared:
        delay = None if killed >= kills else random.uniform(0.02, 0.5)
        if not worked_to_the_end(source, out, delay):
            killed += 1
            continue
        assert [out.read_bytes(), (tmp_path / "out.errors.jsonl").read_bytes()] == whole
        compared += 1
        out.unlink()
        (tmp_path / "out.errors.jsonl").unlink()
        shutil.rmtree(tmp_path / "out.jsonl.job")


@pytest.mark.long
def test_a_killed_job_ends_with_the_same_bytes(tmp_path: Path) -> None:
    kill_repeatedly(tmp_path, kills=6)


@pytest.mark.slow
def test_a_job_killed_200_times_ends_with_the_same_bytes(tmp_path: Path) -> None:
    kill_repeatedly(tmp_path, kills=200)
