"""Batch jobs from Python: handles, iteration, and tables in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from batch_kit import GREEDY, NULL, Recorder, read_lines, toy_worker, write_lines

import carryall
from carryall import LLM, SamplingParams
from carryall.errors import RequestError, UsageError
from carryall.runtime.batch.api import BatchJob
from carryall.runtime.batch.jobs.job import JobChangedError

OPTIONS: dict[str, Any] = {"model": "demo", "loading": NULL, "sampling": GREEDY}
ROWS = [{"text": f"p{n}", "n": n} for n in range(12)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def toy(folder: Path, after: Any = lambda count: None) -> Any:
    return lambda *_: Recorder(toy_worker(folder), after)


def expected() -> list[str]:
    with LLM("demo", provider="null", max_slots=4) as llm:
        params = SamplingParams.from_dict(GREEDY)
        return [out.outputs[0].text for out in llm.generate([f"<p{n}>" for n in range(12)], params)]


def test_a_job_has_a_handle(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"<p{n}>"} for n in range(12)])
    job = carryall.batch.run(source, tmp_path / "out.jsonl", **OPTIONS)
    outcome = job.wait(120)
    assert (outcome.finished, job.totals.completed) == (True, 12)
    assert job.status()["status"] == "completed"
    records = read_lines(tmp_path / "out.jsonl")
    assert list(job.results()) == records
    assert sorted(job, key=lambda record: int(record["id"].rpartition("_")[2])) == records
    assert [record["response"]["body"]["choices"][0]["text"] for record in records] == expected()


def test_requests_in_memory_are_answered_while_they_are_read(tmp_path: Path) -> None:
    seen: list[int] = []
    with carryall.batch.run(
        ({"prompt": "x"} for _ in range(30)), open_executor=toy(tmp_path, seen.append), **OPTIONS
    ) as job:
        folder = job.folder
        numbers = {record["id"] for record in job}
    assert numbers == {f"batch_req_{n}" for n in range(1, 31)}
    assert len(seen) == 30
    assert not folder.exists()


def test_a_job_is_stopped_and_resumed(tmp_path: Path) -> None:
    requests = [{"prompt": f"p{n}"} for n in range(40)]
    jobs: list[BatchJob] = []

    def after(count: int) -> None:
        if count == 5:
            jobs[0].stop()

    jobs.append(
        carryall.batch.run(requests, tmp_path / "out.jsonl", open_executor=toy(tmp_path, after), **OPTIONS)
    )
    assert not jobs[0].wait(60).finished
    assert jobs[0].status()["status"] == "cancelled"
    outcome = carryall.batch.run(
        requests, tmp_path / "out.jsonl", open_executor=toy(tmp_path), **OPTIONS
    ).wait(60)
    assert outcome.finished
    assert 5 <= outcome.answered_before < 40
    changed = carryall.batch.run([*requests[:-1], {"prompt": "new"}], tmp_path / "out.jsonl", **OPTIONS)
    with pytest.raises(JobChangedError, match="the first is line 40"):
        changed.wait(60)
    with pytest.raises(JobChangedError):
        list(changed)


def test_invalid_arguments_raise() -> None:
    with pytest.raises(UsageError, match="unexpected keyword argument 'modell'"):
        carryall.batch.run("x", "y", modell=1, **OPTIONS)
    with pytest.raises(UsageError, match="no input file"):
        carryall.batch.run("none.jsonl", "y.jsonl", **OPTIONS).wait(60)


def frame(kind: str) -> Any:
    if kind == "pandas":
        return pytest.importorskip("pandas").DataFrame(ROWS)
    if kind == "polars":
        return pytest.importorskip("polars").DataFrame(ROWS)
    return pytest.importorskip("datasets").Dataset.from_list(ROWS)


class Rows(list[Any]):
    """A stand-in for datasets.Dataset, for machines without that package."""

    column_names = ("text", "n")

    def add_column(self, name: str, values: list[Any]) -> list[Any]:
        return [{**row, name: value} for row, value in zip(self, values, strict=True)]


@pytest.mark.parametrize("kind", ["pandas", "polars", "datasets", "rows"])
def test_tables_get_a_column(kind: str) -> None:
    table = Rows(ROWS) if kind == "rows" else frame(kind)
    found = carryall.batch.map_table(table, "<{{ text }}>", into="answer", **OPTIONS)
    rows = found.to_dict(orient="records") if kind == "pandas" else found
    rows = found.to_dicts() if kind == "polars" else rows
    assert [row["answer"] for row in rows] == expected()
    assert [(row["text"], row["n"]) for row in rows] == [(row["text"], row["n"]) for row in ROWS]


def test_a_row_that_fails_is_named_or_left_empty() -> None:
    table = Rows([{"text": "a", "n": 1}, {"txt": "b", "n": 2}])
    with pytest.raises(RequestError, match="row 2 of the table"):
        carryall.batch.map_table(table, "{{ text }}", **OPTIONS)
    found = carryall.batch.map_table(table, "{{ text }}", strict=False, **OPTIONS)
    assert (found[0]["output"] is None, found[1]["output"]) == (False, None)


def test_a_value_that_is_not_a_table_is_refused() -> None:
    with pytest.raises(UsageError, match="not dict"):
        carryall.batch.map_table({}, "x", model="demo")
    with pytest.raises(UsageError, match="already has a column 'n'"):
        carryall.batch.map_table(Rows(ROWS), "x", model="demo", into="n")
