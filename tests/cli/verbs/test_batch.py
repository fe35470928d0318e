"""``carryall batch``: input and output files, control from another terminal, and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from batch_kit import read_lines, write_lines
from click.testing import CliRunner, Result

from carryall import LLM, SamplingParams
from carryall.cli import carryall
from carryall.runtime.batch.jobs import writer

LINES: list[Any] = [
    {
        "custom_id": "é",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "def f(x):", "max_tokens": 4},
    },
    {"prompt": "class Stack:"},
]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", LINES)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def words(*arguments: object, provider: str = "null") -> list[str]:
    fixed = ["--model", "demo", "--provider", provider, "--max-tokens", "6", "--temperature", "0"]
    return ["batch", "run", *map(str, arguments), *fixed]


def batch(*arguments: object, provider: str = "null", stdin: str | None = None) -> Result:
    return CliRunner().invoke(carryall, words(*arguments, provider=provider), input=stdin)


def on_job(*arguments: object) -> Result:
    return CliRunner().invoke(carryall, ["batch", *map(str, arguments)])


def usage(path: Path) -> dict[str, int]:
    return {
        record["custom_id"]: record["response"]["body"]["usage"]["completion_tokens"]
        for record in read_lines(path)
    }


def test_a_file_is_answered(source: Path, out: Path) -> None:
    result = batch(source, "-o", out)
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    assert "2 completed, 0 failed" in result.stderr
    assert usage(out) == {"é": 4, "line-2": 6}  # the limit of the line, and the limit of the command line


def test_failed_lines_have_a_file_and_show_in_the_exit_code(tmp_path: Path, out: Path) -> None:
    source = write_lines(tmp_path / "bad.jsonl", [LINES[0], "{oops", {"prompt": 5}])
    result = batch(source, "-o", out)
    assert result.exit_code == 1
    assert "1 completed, 2 failed (1 invalid_line, 1 invalid_request)" in result.stderr
    assert "failed lines are in" in result.stderr
    errors = read_lines(tmp_path / "out.errors.jsonl")
    assert [(e["custom_id"], e["response"], e["error"]["code"]) for e in errors] == [
        ("line-2", None, "invalid_line"),
        ("line-3", None, "invalid_request"),
    ]
    assert usage(out) == {"é": 4}


def test_the_same_command_again_says_that_it_is_done(source: Path, out: Path) -> None:
    assert batch(source, "-o", out).exit_code == 0
    result = batch(source, "-o", out)
    assert result.exit_code == 0
    assert "was already finished: 2 completed, 0 failed" in result.stderr


def test_another_option_is_refused_until_restart(source: Path, out: Path) -> None:
    assert batch(source, "-o", out).exit_code == 0
    result = batch(source, "-o", out, "--seed", "3")
    assert result.exit_code == 2
    assert "options.seed: 0 -> 3" in result.stderr
    assert batch(source, "-o", out, "--seed", "3", "--restart").exit_code == 0


def test_events_are_lines_of_json(source: Path, out: Path) -> None:
    result = batch(source, "-o", out, "--json")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["event"] for event in events] == ["start", "loaded", "progress", "finished"]
    assert events[0]["lines"] == 2
    assert (events[-1]["completed"], events[-1]["failed"], events[-1]["completion_tokens"]) == (2, 0, 10)
    assert events[-1]["output"] == str(out)


def test_standard_streams() -> None:
    result = batch("-", "-o", "-", "-q", stdin='{"prompt": "a"}\n{broken\n')
    assert (result.exit_code, result.stderr) == (1, "")
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert {record["custom_id"]: record["error"] is None for record in found} == {
        "line-1": True,
        "line-2": False,
    }


def test_stdin_is_checked_line_by_line(out: Path) -> None:
    text = '{"prompt": "a"}\n{"prompt": "b"}\n'
    assert batch("-", "-o", out, stdin=text).exit_code == 0
    assert batch("-", "-o", out, stdin=text).exit_code == 0
    result = batch("-", "-o", out, stdin=text.replace("b", "c"))
    assert (result.exit_code, "line 2 of the input differs from the line" in result.stderr) == (2, True)
    result = batch("-", "-o", out, stdin=text[:16])
    assert (result.exit_code, "the input has 1 lines" in result.stderr) == (2, True), result.stderr
    assert len(read_lines(out)) == 2


def test_a_model_that_cannot_be_loaded_leaves_no_output(source: Path, out: Path) -> None:
    assert batch(source, "-o", out, provider="nonsense").exit_code == 2
    assert not out.exists()
    assert batch(source, "-o", out).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "-", "--json"], "need a file as OUT"),
        (["-o", "-", "--restart"], "need a file as OUT"),
        (["-o", "IN"], "is the input"),
        (["-o", "OUT", "--errors", "IN"], "is the input"),
        (["-o", "nowhere/out.jsonl"], "does not exist; create it first"),
        (["-o", "OUT", "--template", "{{ text"], "the template has a syntax error"),
        (["-o", "OUT", "--system", "x"], "need a template"),
        (["-o", "OUT", "--template", "@nowhere"], "nowhere"),
        (["-o", "OUT", "--json-schema", "{"], "--json-schema is not JSON"),
        (["-o", "OUT", "--json-schema", "{}", "--choice", "a"], "exclude each other"),
        (["-o", "memory://out.jsonl"], "--job DIR"),
        ([], "Missing option '-o'"),
    ],
)
def test_wrong_use(source: Path, out: Path, arguments: list[str], message: str) -> None:
    before = source.read_text()
    paths = {"IN": source, "OUT": out}
    result = batch(source, *(paths.get(word, word) for word in arguments))
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    assert source.read_text() == before
    assert list(source.parent.iterdir()) == [source]


def test_a_missing_file_is_named(out: Path) -> None:
    result = batch("nowhere.jsonl", "-o", out)
    assert (result.exit_code, "nowhere.jsonl" in result.stderr) == (2, True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_writable_is_refused(tmp_path: Path, source: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    result = batch(source, "-o", folder / "out.jsonl")
    assert (result.exit_code, "is not writable" in result.stderr) == (2, True)


def test_a_folder_that_is_not_writable_is_refused_for_every_user(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    result = batch(source, "-o", out)
    assert (result.exit_code, "is not writable" in result.stderr) == (2, True)


def test_the_embedded_model_on_the_cpu_gives_what_llm_gives(source: Path, out: Path) -> None:
    assert batch(source, "-o", out, provider="cpu").exit_code == 0
    with LLM("demo", max_slots=2) as llm:
        params = [SamplingParams(temperature=0, max_tokens=tokens) for tokens in (4, 6)]
        expected = [output.outputs[0].text for output in llm.generate(["def f(x):", "class Stack:"], params)]
    texts = [record["response"]["body"]["choices"][0]["text"] for record in read_lines(out)]
    assert texts == expected


def background(source: Path, out: Path, *arguments: str) -> subprocess.Popen[str]:
    slow = ["--provider-option", "step_seconds=0.01", "--json", *arguments]
    command = [sys.executable, "-m", "carryall", *words(source, "-o", out, *slow)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until_answers(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == "progress":
            return
    raise AssertionError(process.stderr.read() if process.stderr else "")


@pytest.fixture
def long_source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "long.jsonl", [{"prompt": f"p{n}"} for n in range(3000)])


@pytest.mark.long
def test_a_job_is_watched_and_cancelled_from_another_terminal(
    long_source: Path, out: Path, tmp_path: Path
) -> None:
    process = background(long_source, out)
    until_answers(process)
    found = json.loads(on_job("status", out, "--json").stdout)
    assert (found["object"], found["status"]) == ("batch", "in_progress")
    assert found["request_counts"]["total"] == 3000
    assert 0 < found["request_counts"]["completed"] < 3000
    assert found["process"]["pid"] == process.pid
    assert on_job("status", out).stdout.startswith("in_progress: ")
    assert batch(long_source, "-o", out).exit_code == 2  # a second process
    assert on_job("cancel", out).exit_code == 0
    events, _ = process.communicate(timeout=60)
    assert (process.returncode, json.loads(events.splitlines()[-1])["event"]) == (1, "stopped")
    assert json.loads(on_job("status", out, "--json").stdout)["status"] == "cancelled"
    assert on_job("cancel", out).exit_code == 1
    merged = tmp_path / "merged.jsonl"
    assert on_job("merge", out, "-o", merged).exit_code == 0
    count = len(read_lines(merged))
    assert found["request_counts"]["completed"] <= count < 3000
    assert not out.exists()
    result = batch(long_source, "-o", out)
    assert f"{count} lines are already answered" in result.stderr
    assert len(read_lines(out)) == 3000
    assert json.loads(on_job("status", out, "--json").stdout)["status"] == "completed"
    assert on_job("merge", out, "-o", merged).exit_code == 2  # it exists


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_job_with_what_is_answered(long_source: Path, out: Path, number: int) -> None:
    process = background(long_source, out)
    until_answers(process)
    process.send_signal(number)
    events, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + number, "")
    assert json.loads(events.splitlines()[-1])["event"] == "stopped"
    assert json.loads(on_job("status", out, "--json").stdout)["request_counts"]["completed"] > 0


def test_failed_lines_are_tried_again(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "COMMIT_SECONDS", 0.0)
    late = {"prompt": "x", "timeout": 0.001, "max_tokens": 900, "ignore_eos": True}
    source = write_lines(tmp_path / "in.jsonl", [LINES[1], late])
    monkeypatch.chdir(tmp_path)
    assert batch(source.name, "-o", out.name).exit_code == 1
    before = out.read_text()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr("carryall.runtime.batch.workers.offline.time.monotonic", lambda: 1e9)
    result = on_job("retry-failed", out)
    assert "1 failed lines are tried again" in result.stderr
    assert result.exit_code == 0, result.stderr
    assert out.read_text().startswith(before)
    assert usage(out)["line-2"] == 900
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_a_job_that_is_none_is_named(tmp_path: Path) -> None:
    for verb in (["status"], ["cancel"], ["report"], ["retry-failed"], ["merge", "-o", "x"]):
        result = on_job(verb[0], tmp_path / "none", *verb[1:])
        assert (result.exit_code, "neither a job folder nor the output" in result.stderr) == (2, True)


def test_the_pieces_of_a_job_are_merged(tmp_path: Path) -> None:
    parts: Sequence[Path] = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, prompt in zip(parts, "ab", strict=True):
        write_lines(path, [{"prompt": prompt, "custom_id": prompt}, "{broken"])
        batch(path, "-o", path.with_suffix(".out"))
    merged, errors = tmp_path / "all.jsonl", tmp_path / "errors.jsonl"
    result = on_job("merge", *(p.with_suffix(".out") for p in parts), "-o", merged, "--errors", errors)
    assert (result.exit_code, "2 results" in result.stderr) == (0, True)
    assert [record["custom_id"] for record in read_lines(merged)] == ["a", "b"]
    assert len(read_lines(errors)) == 2


def test_without_a_verb_the_help_is_shown() -> None:
    result = on_job()
    assert (result.exit_code, result.stderr) == (0, "")
    assert "retry-failed" in result.stdout
