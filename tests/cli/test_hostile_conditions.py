"""Every verb in a process that the system gives little to: closed pipes, no permission, low limits.

Each ends with a documented exit code and at most one line of error, soon, and leaves nothing half-written.
Every run tries a few conditions; the slow test tries all verbs with all conditions.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

pytest.importorskip("resource", reason="limits of POSIX")
from conditions import CONDITIONS, Condition
from forked import ForkServer, fork_server

from carryall.cli import carryall

SECONDS = 60  # of a busy machine
CPU_SECONDS = 5
FRESH_CPU_SECONDS = 10  # with the imports, 2.5 s, which take twice as long while the machine is busy
# These take longer undisturbed: an export and 100 tokens, two providers, measurements, two transports.
LONG = {"demo": 15, "doctor": 15, "doctor --selftest": 15, "bench": 10, "serve": 15}
IDLE_SECONDS, IDLE_TICKS = 1, 10  # a service that works for less than 10 % of a second is asked to end
CODE = "import sys; sys.argv[0] = 'carryall'; from carryall.cli import main; main()"
VERBS = {
    "export": "export checkpoint out/x -q",
    "quantize": "quantize package out/x --method fp16 -q",
    "optimize": "optimize package out/x -q --report out/report.html",
    "optimize a file": "optimize package/model.onnx out/x.onnx -q",
    "run": "run package def -q --max-tokens 2",
    "chat": "chat package -q --max-tokens 2",
    "serve": "serve package -q --http-port 0 --grpc-port 0",
    "batch run": "batch run lines.jsonl -o out/results.jsonl --model package -q",
    "batch status": "batch status done.jsonl",
    "batch merge": "batch merge done.jsonl -o out/merged.jsonl",
    "batch report": "batch report done.jsonl -o out/report.html",
    "batch cancel": "batch cancel done.jsonl",
    "batch retry-failed": "batch retry-failed done.jsonl -q",
    "bench": "bench package -q --batch 1 --prompt-tokens 4 --new-tokens 2",
    "eval": "eval package --text text.txt --max-tokens 20 -q",
    "inspect": "inspect package",
    "plan": "plan package --bandwidth 10GB",
    "detect": "detect package text.txt",
    "embed": "embed missing/model text",
    "rerank": "rerank missing/model query text",
    "agent": "agent --url http://127.0.0.1:9 --print claude",
    "verify": "verify package package --steps 2",
    "verify --integrity": "verify package --integrity",
    "diff": "diff package package",
    "cache list": "cache list",
    "cache prune": "cache prune --max-size 1TB",
    "cache clear": "cache clear --yes",
    "pull": "pull demo",
    "list": "list",
    "rm": "rm missing",
    "doctor": "doctor -q",
    "doctor --selftest": "doctor --selftest --selftest-limit 0 -q",
    "demo": "demo --json",
    "families": "families",
    "help": "--help",
    "help of run": "run --help",
}


def leaves(group: click.Group, words: str = "") -> Iterator[str]:
    """The words of all commands."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from leaves(command, f"{words}{name} ")
        else:
            yield words + name


def test_every_verb_is_tried() -> None:
    missing = [
        words
        for words in leaves(carryall)
        if not any(f"{command} ".startswith(f"{words} ") for command in VERBS.values())
    ]
    assert missing == []


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with fork_server() as server:
        yield server


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, tiny_package: Path) -> Path:
    """A folder with everything that the verbs name."""
    folder = tmp_path_factory.mktemp("conditions")
    shutil.copytree(tiny_checkpoint, folder / "checkpoint")
    shutil.copytree(tiny_package, folder / "package")
    (folder / "lines.jsonl").write_text('{"prompt": "def f(", "max_tokens": 2}\n' * 3)
    (folder / "text.txt").write_text("def f(x):\n    return x\n" * 20)
    (folder / "out").mkdir()
    (folder / "cache").mkdir()
    (folder / "warm").mkdir()
    return folder


@pytest.fixture(scope="module")
def used(sandbox: Path, server: ForkServer) -> Path:
    """The sandbox with a finished job and a filled cache."""
    made = run(server, sandbox, "batch run lines.jsonl -o done.jsonl --model package -q", Condition())
    assert made[0] == 0, made
    shutil.copytree(sandbox / "cache", sandbox / "warm", dirs_exist_ok=True)
    return sandbox


def run(
    server: ForkServer, folder: Path, command: str, condition: Condition, cpu_seconds: int = CPU_SECONDS
) -> tuple[int, str, str]:
    """Run a command in a folder; return its exit code, stdout and stderr."""
    pipes = [os.pipe() for _ in range(3)]
    (stdin, given), (text, stdout), (errors, stderr) = pipes
    os.write(given, b"hi\n" if "chat" in command else b"")
    os.close(given)
    if condition.stdout == "closed":
        os.close(text)
    elif condition.stdout.startswith("/"):
        os.close(stdout)
        stdout = os.open(condition.stdout, os.O_WRONLY)
    environment = {**os.environ, "CARRYALL_CACHE": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONUNBUFFERED", None)  # a buffer that cannot be flushed at the end is a condition too
    prepare = functools.partial(condition.prepare, cpu_seconds)
    streams = (stdin, stdout, stderr)
    words = command.split()
    if condition.fresh:
        code = fresh(words, folder, environment, prepare, streams)
    else:
        process = server.start(words, folder, environment, prepare, streams)
        code = ended(server, process, stops=words[0] == "serve")
    for one in streams:
        os.close(one)
    return code, "" if condition.stdout == "closed" else content(text), content(errors)


def ended(server: ForkServer, process: int, *, stops: bool) -> int:
    """Wait for a process; ask it to end if it is a service."""
    if stops:
        for _ in until_idle(process):
            with contextlib.suppress(TimeoutError):
                return server.wait(process, IDLE_SECONDS, kill=False)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    return server.wait(process, SECONDS)


def until_idle(process: int) -> Iterator[None]:
    """Yield while a process works, or waits for a busy processor or disk, between two steps."""
    spent = -IDLE_TICKS - 1
    while True:
        try:
            tasks = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/stat")]
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # a thread or the process has ended
            tasks, fields = [], []
            if not Path(f"/proc/{process}").exists():
                return
        states = {task.rpartition(")")[2].split()[0] for task in tasks}
        now = int(fields[11]) + int(fields[12]) if fields else spent  # user and system time in ticks
        if fields and not states & {"R", "D"} and now <= spent + IDLE_TICKS:
            return
        spent = now
        yield


def fresh(
    words: list[str],
    folder: Path,
    environment: dict[str, str],
    prepare: functools.partial[None],
    streams: tuple[int, int, int],
) -> int:
    """Run a command in a new interpreter; return its exit code."""
    with subprocess.Popen(
        [sys.executable, "-c", CODE, *words],
        cwd=folder,
        env=environment,
        stdin=streams[0],
        stdout=streams[1],
        stderr=streams[2],
        preexec_fn=prepare,
    ) as process:
        try:
            if words[0] == "serve":
                for _ in until_idle(process.pid):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        return process.wait(IDLE_SECONDS)
                process.terminate()
            return process.wait(SECONDS)
        finally:
            process.kill()


def content(pipe: int) -> str:
    with open(pipe, errors="replace") as file:
        return file.read()


def check(server: ForkServer, sandbox: Path, verb: str, name: str) -> None:
    condition = CONDITIONS[name]
    seconds = LONG.get(verb, FRESH_CPU_SECONDS if condition.fresh else CPU_SECONDS)
    for folder in ("out", "cache"):
        shutil.rmtree(sandbox / folder)
    (sandbox / "out").mkdir()
    shutil.copytree(sandbox / "warm", sandbox / "cache")
    before = {path: (sandbox / path).stat().st_mode for path in condition.modes}
    for path, mode in condition.modes.items():
        (sandbox / path).chmod(mode)
    try:
        code, stdout, stderr = run(server, sandbox, VERBS[verb], condition, seconds)
    finally:
        for path, mode in before.items():
            (sandbox / path).chmod(mode)
    shown = f"{verb}, {name}: {code}\n{stdout[-1000:]}\n{stderr[-3000:]}"
    assert code in (0, 1, 2), shown
    assert "Traceback" not in stderr, shown
    assert "Exception ignored" not in stderr, shown
    lines = [line for line in stderr.splitlines() if not line.startswith("warning: ")]
    left = sorted(str(path.relative_to(sandbox / "out")) for path in (sandbox / "out").rglob("*"))
    if code:
        silent = condition.stdout or (verb == "doctor" and "next steps" in stdout)  # its report tells
        assert [line[:7] for line in lines] in (["error: "], [] if silent else ["error: "]), shown
        whole = [one for one in left if not re.match(r"results\.jsonl\.job|\.", one)]
        assert whole == [] or condition.stdout, (shown, left)
    assert [one for one in left if one.startswith(".")] == [], (shown, left)


FEW = [
    ("families", "a pipe that nobody reads"),
    ("verify --integrity", "unreadable weights"),
    ("cache list", "12 open files"),
    ("cache list", "no stdout"),
]


@pytest.mark.long
@pytest.mark.parametrize(("verb", "name"), FEW)
def test_a_few_conditions(verb: str, name: str, server: ForkServer, sandbox: Path) -> None:
    check(server, sandbox, verb, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.parametrize("verb", VERBS)
def test_all_conditions(verb: str, name: str, server: ForkServer, used: Path) -> None:
    check(server, used, verb, name)
