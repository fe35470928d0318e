"""The command group: exit codes, one-line errors, help without heavy imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from carryall.cli import carryall
from carryall.cli.group import SUMMARIES
from carryall.errors import CheckpointError, ModelNotFoundError
from carryall.storage.cache import cached_folder


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process."""
    command = [sys.executable, "-m", "carryall", *args]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}, timeout=120
    )


def failing_verb(error: BaseException) -> click.Command:
    def body() -> None:
        raise error

    return click.Command("failing", callback=body)


@pytest.mark.parametrize(("encoding", "name"), [("utf-8", "\u6f22\\udcff"), ("latin-1", "\\u6f22\\udcff")])
def test_characters_that_stdout_lacks_are_escapes(
    encoding: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the name of a model, whose last byte is no text."""
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path))
    cached_folder("packages", "0" * 32, lambda folder: (folder / "file").touch(), {"model": "\u6f22\udcff"})
    result = run("list", PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1].split()[0] == name


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ModelNotFoundError("no model 'x'"), 2, "error: no model 'x'"),
        (CheckpointError("shard 2\nis truncated"), 1, "error: shard 2 is truncated"),
        (
            MemoryError("Unable to allocate 9 GiB"),
            1,
            "error: the memory of this process is exhausted: Unable to allocate 9 GiB; "
            "end other programs, or take a smaller or quantized model",
        ),
        (
            RuntimeError("can't start new thread"),
            1,
            "error: can't start new thread: the limit of threads or of memory is reached "
            "('ulimit -u', 'ulimit -v')",
        ),
        (
            ImportError("x.so: failed to map segment from shared object"),
            1,
            "error: a library cannot be loaded, since the memory of this process is exhausted: "
            "x.so: failed to map segment from shared object; "
            "end other programs, or take a smaller or quantized model",
        ),
        (
            OSError(12, "Cannot allocate memory"),
            1,
            "error: the memory of this process is exhausted: [Errno 12] Cannot allocate memory; "
            "end other programs, or take a smaller or quantized model",
        ),
        (
            OSError(28, "No space left on device", "out"),
            1,
            "error: [Errno 28] No space left on device: 'out'",
        ),
        (click.UsageError("bad option."), 2, "error: bad option (see 'carryall failing --help')"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
    ],
)
def test_errors_become_one_line_and_a_code(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(carryall), "get_command", lambda *_: failing_verb(error))
    result = CliRunner().invoke(carryall, ["failing"], prog_name="carryall")
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.strip() == line


def test_a_fault_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(carryall), "get_command", lambda *_: failing_verb(ZeroDivisionError("ours")))
    assert isinstance(CliRunner().invoke(carryall, ["failing"]).exception, ZeroDivisionError)


def test_an_unknown_verb_suggests_the_nearest_one() -> None:
    done = run("exprot")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: there is no verb 'exprot'; did you mean 'export'? (see 'carryall --help')\n"


def test_an_unknown_option_is_wrong_use() -> None:
    done = run("--colour")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: No such option '--colour'")


@pytest.mark.parametrize(
    ("args", "value", "shown"), [(["--debug"], "", True), ([], "1", True), ([], "0", False), ([], "", False)]
)
def test_debug_shows_the_traceback(args: list[str], value: str, shown: bool) -> None:
    done = run(*args, "exprot", CARRYALL_DEBUG=value)
    assert done.returncode == 2
    assert ("Traceback" in done.stderr) == shown


def test_without_arguments_the_help_is_shown() -> None:
    done = run()
    assert done.returncode == 0
    assert done.stdout == run("--help").stdout


def test_the_version_is_the_package_s() -> None:
    import carryall as package

    assert run("--version").stdout == f"carryall {package.__version__}\n"


def test_a_closed_pipe_is_no_traceback() -> None:
    command = [sys.executable, "-m", "carryall", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_the_help_lists_every_verb() -> None:
    text = CliRunner().invoke(carryall, ["--help"]).stdout
    for verb, summary in SUMMARIES.items():
        assert f"  {verb.ljust(8)}  {summary}" in text


NOTES = """
import click
from rich.console import Console
from carryall.cli import carryall

def verb():
    click.echo("a note", err=True)
    Console(stderr=True).print("50 %")
    click.echo("the result")

type(carryall).get_command = lambda *_: click.Command("verb", callback=verb)
carryall.main(["verb"])
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("arguments", "code", "out"),
    [(["-m", "carryall", "run", "/nosuch", "text"], 2, b""), (["-c", NOTES], 0, b"the result\n")],
)
def test_the_exit_code_stays_if_stderr_cannot_be_written(
    arguments: list[str], code: int, out: bytes, unbuffered: str
) -> None:
    command = [sys.executable, *arguments]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stderr=full, stdout=subprocess.PIPE, timeout=60, check=False, env=env)
    assert (done.returncode, done.stdout) == (code, out)


THREADS = """
import os, threadpoolctl
import click
from carryall.cli import carryall
with click.Context(carryall) as context:
    carryall.get_command(context, "run")
import numpy
[threads] = {each["num_threads"] for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"}
print(threads, os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.mark.parametrize(("asked", "shown"), [(None, "1 None"), ("2", "2 2")])
def test_products_of_numpy_take_one_thread_unless_the_user_asks_for_more(
    asked: str | None, shown: str
) -> None:
    known = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    env = known if asked is None else {**known, "OPENBLAS_NUM_THREADS": asked}
    done = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, check=False, env=env
    )
    assert (done.returncode, done.stdout.strip()) == (0, shown), done.stderr
