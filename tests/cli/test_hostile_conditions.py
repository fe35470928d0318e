"""Every verb in a process that the system gives little to: closed pipes, no permission, low limits.

Each ends with a documented exit code and at most one line of error, soon, and leaves nothing half-written.
Every run tries a few conditions; the slow test tries all verbs with all conditions.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

resource = pytest.importorskip("resource", reason="limits of POSIX")

SECONDS = 60  # of a busy machine; those of the processor are limited to 15
CODE = "import sys; sys.argv[0] = 'carryall'; from carryall.cli import main; main()"
VERBS = {
    "export": "export checkpoint out/x -q",
    "quantize": "quantize package out/x --method fp16 -q",
    "optimize": "optimize package out/x -q --report out/report.html",
    "optimize a file": "optimize package/model.onnx out/x.onnx -q",
    "run": "run package def -q --max-tokens 2",
    "chat": "chat package -q --max-tokens 2",
    "batch run": "batch run lines.jsonl -o out/results.jsonl --model package -q",
    "batch status": "batch status done.jsonl",
    "batch merge": "batch merge done.jsonl -o out/merged.jsonl",
    "batch report": "batch report done.jsonl -o out/report.html",
    "bench": "bench package -q --batch 1 --prompt-tokens 4 --new-tokens 2",
    "eval": "eval package --text text.txt --max-tokens 20 -q",
    "inspect": "inspect package",
    "verify": "verify package package --steps 2",
    "verify --integrity": "verify package --integrity",
    "diff": "diff package package",
    "cache list": "cache list",
    "cache prune": "cache prune --max-size 1TB",
    "families": "families",
    "help": "--help",
    "help of run": "run --help",
}
_DROP_FROM_BOUNDING_SET, _DAC_OVERRIDE, _DAC_READ_SEARCH = 24, 1, 2


def without_override() -> None:
    """Let the program that is executed next respect the modes of files, even as root."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (_DAC_OVERRIDE, _DAC_READ_SEARCH):
        if os.geteuid() == 0 and libc.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0):
            os._exit(99)


def limit(kind: str, amount: int) -> Callable[[], None]:
    def apply() -> None:
        resource.setrlimit(getattr(resource, kind), (amount, amount))

    return apply


@dataclass(frozen=True)
class Condition:
    """What holds for a process.

    Args:
        apply: called in the process before the program.
        modes: modes of files and folders of the sandbox, by name.
        stdout: "" for a pipe that is read, "closed" for one that nobody reads, "none" for no descriptor.
        may_work: whether commands may succeed.
    """

    apply: Callable[[], None] = lambda: None
    modes: dict[str, int] = field(default_factory=dict)
    stdout: str = ""
    may_work: bool = True


CONDITIONS = {
    "a pipe that nobody reads": Condition(stdout="closed"),
    "no stdout": Condition(stdout="none"),
    "a full stdout": Condition(stdout="/dev/full"),
    "unreadable weights": Condition(without_override, {"package/model.onnx.data": 0}),
    "unreadable files": Condition(
        without_override,
        {
            "package/carryall.json": 0,
            "checkpoint/config.json": 0,
            "lines.jsonl": 0,
            "text.txt": 0,
            "done.jsonl": 0,
        },
    ),
    "unreadable folders": Condition(without_override, {"package": 0, "checkpoint": 0, "done.jsonl.job": 0}),
    "a read-only output folder": Condition(without_override, {"out": 0o555}),
    "a read-only cache": Condition(without_override, {"cache": 0o555}),
    "files of 10 kB": Condition(limit("RLIMIT_FSIZE", 10_000)),
    "files of 0 bytes": Condition(limit("RLIMIT_FSIZE", 0)),
    "1 GB of addresses": Condition(limit("RLIMIT_AS", 1 << 30)),
    "300 MB of addresses": Condition(limit("RLIMIT_AS", 300 << 20)),
    "12 open files": Condition(limit("RLIMIT_NOFILE", 12)),
    "20 open files": Condition(limit("RLIMIT_NOFILE", 20)),
    "1 process": Condition(limit("RLIMIT_NPROC", 1)),
}


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
def used(sandbox: Path) -> Path:
    """The sandbox with a finished job and a filled cache."""
    made = run(sandbox, "batch run lines.jsonl -o done.jsonl --model package -q", Condition())
    assert made[0] == 0, made
    shutil.copytree(sandbox / "cache", sandbox / "warm", dirs_exist_ok=True)
    return sandbox


def run(folder: Path, command: str, condition: Condition) -> tuple[int, str, str]:
    """Run a command in a folder; return its exit code, stdout and stderr."""

    def prepare() -> None:
        if condition.stdout == "none":
            os.close(1)
        resource.setrlimit(resource.RLIMIT_CPU, (15, 15))
        condition.apply()

    read, write = os.pipe()
    if condition.stdout == "closed":
        os.close(read)
    stdout = os.open(condition.stdout, os.O_WRONLY) if condition.stdout.startswith("/") else write
    with subprocess.Popen(
        [sys.executable, "-c", CODE, *command.split()],
        cwd=folder,
        env={**os.environ, "CARRYALL_CACHE": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
        preexec_fn=prepare,
        text=True,
    ) as process:
        for one in {stdout, write}:
            os.close(one)
        try:
            _, stderr = process.communicate("hi\n" if "chat" in command else "", timeout=SECONDS)
        finally:
            process.kill()
    text = ""
    if condition.stdout != "closed":
        with open(read, errors="replace") as file:
            text = file.read()
    return process.returncode, text, stderr


def check(sandbox: Path, verb: str, name: str) -> None:
    condition = CONDITIONS[name]
    for folder in ("out", "cache"):
        shutil.rmtree(sandbox / folder)
    (sandbox / "out").mkdir()
    shutil.copytree(sandbox / "warm", sandbox / "cache")
    before = {path: (sandbox / path).stat().st_mode for path in condition.modes}
    for path, mode in condition.modes.items():
        (sandbox / path).chmod(mode)
    try:
        code, stdout, stderr = run(sandbox, VERBS[verb], condition)
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
        assert [line[:7] for line in lines] in (["error: "], [] if condition.stdout else ["error: "]), shown
        whole = [one for one in left if not re.match(r"results\.jsonl\.job|\.", one)]
        assert whole == [] or condition.stdout, (shown, left)
    assert [one for one in left if one.startswith(".")] == [], (shown, left)


FEW = [
    ("families", "a pipe that nobody reads"),
    ("verify --integrity", "unreadable weights"),
    ("cache list", "12 open files"),
    ("cache list", "no stdout"),
]


@pytest.mark.parametrize(("verb", "name"), FEW)
def test_a_few_conditions(verb: str, name: str, sandbox: Path) -> None:
    check(sandbox, verb, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.parametrize("verb", VERBS)
def test_all_conditions(verb: str, name: str, used: Path) -> None:
    check(used, verb, name)
