"""Every command with every fault of a call on its files: an error of one line, and nothing half-written.

After the fault the same command gives the same bytes as one that was never disturbed. A batch job waits while
the disk is full. What only a cache or a KV tier loses changes no result.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result
from faults import CALLS, NUMBERS, Fault, faulty
from forked import ForkServer, fork_server, stop_here

from carryall.cli import carryall
from carryall.runtime.batch.jobs import writer
from carryall.storage import hashes

PROMPT = "def f(x): return x + 1 " * 4  # more than one chunk of the prefix cache
READS = ("open", "read")
WRITES = tuple(call for call in CALLS if call not in READS)
COMMANDS = {
    "export": "export in/checkpoint out/x -q",
    "export int4": "export in/checkpoint out/x -q --quantize int4-fast",
    "optimize": "optimize in/package out/x -q --report out/report.html",
    "optimize a file": "optimize in/package/model.onnx out/x.onnx -q",
    "quantize": "quantize in/package out/x --method fp16 -q",
    "verify": "verify in/package in/package --steps 2",
    "run": "run in/package def -q --max-tokens 2",
    "write KV": "run in/package PROMPT -q --max-tokens 2 --prefix-cache-dir out/kv",
    "read KV": "run in/package PROMPT -q --max-tokens 2 --prefix-cache-dir in/kv",
    "batch run": "batch run in/lines.jsonl -o out/results.jsonl --model in/package -q",
    "batch merge": "batch merge in/done.jsonl -o out/results.jsonl",
    "batch report": "batch report in/done.jsonl -o out/report.html",
}
# Files with times or measurements, and files that may differ: an interrupted job stays to be resumed.
VARIABLE = re.compile(r"report\.html|\.job/|kv/")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="names of open files come from /proc"),
]


class Row(NamedTuple):
    """A kind of fault in one of the folders of a command."""

    command: str
    folder: str
    call: str
    number: int


ROWS = [
    Row(command, folder, call, number)
    for command in COMMANDS
    for folder, calls in (("in", READS), ("out", CALLS), ("cache", CALLS))
    for call in calls
    for number in NUMBERS[call]
]


@pytest.fixture(scope="module")
def sandbox(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, tiny_package: Path
) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("faults").resolve()
    (folder / "in").mkdir()
    shutil.copytree(tiny_checkpoint, folder / "in/checkpoint")
    shutil.copytree(tiny_package, folder / "in/package")
    lines = ({"prompt": f"def f{number}(", "max_tokens": 2, "temperature": 0} for number in range(3))
    (folder / "in/lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(writer, "_RETRY_SECONDS", 0.01)
        patch.setattr(writer, "COMMIT_SECONDS", 0.01)
        yield folder


@pytest.fixture(autouse=True)
def own_cache(cache: None, sandbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(sandbox / "cache"))


def run(command: str) -> Result:
    words = [PROMPT if word == "PROMPT" else word for word in COMMANDS[command].split()]
    return CliRunner().invoke(carryall, words)


def fresh(sandbox: Path) -> None:
    """Empty the folders of results and the cache."""
    hashes._in_process.clear()
    for name in ("out", "cache"):
        shutil.rmtree(sandbox / name, ignore_errors=True)
        (sandbox / name).mkdir()


def results(sandbox: Path, result: Result) -> dict[str, bytes]:
    """What a command printed and wrote, but times."""
    # Other commands print times.
    stdout = re.sub(r"\d+(\.\d+)? *m?s\b| +[\d.]+$", "", result.stdout, flags=re.M)
    return {"stdout": stdout.encode(), **files(sandbox)}


def files(sandbox: Path) -> dict[str, bytes]:
    """What a command wrote, but times."""
    found = {}
    for path in sorted((sandbox / "out").rglob("*")):
        name = str(path.relative_to(sandbox))
        if not path.is_file() or VARIABLE.search(name):
            continue
        found[name] = path.read_bytes()
        if path.suffix == ".jsonl":
            bodies = [json.loads(line)["response"]["body"] for line in found[name].splitlines()]
            found[name] = json.dumps([(body["choices"], body["usage"]) for body in bodies]).encode()
    return found


@pytest.fixture
def undisturbed(command: str, sandbox: Path) -> dict[str, bytes]:
    """The results of a command without a fault."""
    fresh(sandbox)
    if command == "read KV" and not (sandbox / "in/kv").exists():
        assert run("write KV").exit_code == 0
        assert list((sandbox / "out/kv").rglob("*.kv"))
        shutil.copytree(sandbox / "out/kv", sandbox / "in/kv")
    if command in ("batch merge", "batch report") and not (sandbox / "in/done.jsonl").exists():
        assert run("batch run").exit_code == 0
        for path in (sandbox / "out").iterdir():
            path.rename(sandbox / "in" / path.name.replace("results", "done"))
    result = run(command)
    assert result.exit_code == 0, result.output
    return results(sandbox, result)


def attempt(row: Row, skip: int, sandbox: Path, expected: dict[str, bytes]) -> int:
    """Run a command with a fault; return how many calls of this kind it made."""
    fresh(sandbox)
    full_disk = row.command == "batch run" and row.number == errno.ENOSPC  # the job waits for room
    count = 2 if full_disk else 1 << 30
    with faulty(Fault(sandbox / row.folder, row.call, row.number, skip, count)) as fault:
        result = run(row.command)
    shown = f"{row} after {skip}: {result.output}"
    assert result.exception is None or isinstance(result.exception, SystemExit), (shown, result.exc_info)
    if result.exit_code == 0:
        assert results(sandbox, result) == expected, shown
    else:
        assert result.exit_code in (1, 2), shown
        lines = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
        assert [line[:7] for line in lines] == ["error: "], shown
        assert os.strerror(row.number) in lines[0], shown
        assert not re.search(r"/\.[^/']*\.[0-9a-f]{8}|\.\d+'|None|passes? \w+ failed", lines[0]), shown
        assert result.stdout == "", shown
        if "was written, but its report" not in lines[0]:
            left = files(sandbox)  # whole: a folder may not be synchronized after a file got its name
            assert left == {} or left == {name: expected[name] for name in left}, shown
            fresh(sandbox)
            again = run(row.command)
            assert again.exit_code == 0, (shown, again.output)
            assert results(sandbox, again) == expected, shown
    assert list((sandbox / "cache").glob("*/.*")) == [], shown
    return fault.seen


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_a_fault_of_a_call(command: str, sandbox: Path, undisturbed: dict[str, bytes]) -> None:
    rng = random.Random(command)
    rows = [row for row in ROWS if row.command == command and row.folder != "cache"]
    attempt(rng.choice(rows), rng.randrange(3), sandbox, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["in", "out", "cache"])
@pytest.mark.parametrize("command", COMMANDS)
def test_all_faults_of_calls(command: str, folder: str, sandbox: Path, undisturbed: dict[str, bytes]) -> None:
    for row in (row for row in ROWS if (row.command, row.folder) == (command, folder)):
        skip = 0
        while attempt(row, skip, sandbox, undisturbed) > skip:
            skip += 1 if skip < 4 else 7


SYSTEM_CALLS = {
    "write,pwrite64,sendfile,copy_file_range": (errno.ENOSPC, errno.EIO),
    "fsync,fdatasync": (errno.ENOSPC, errno.EIO),
    "rename,renameat,renameat2,link": (errno.ENOSPC, errno.EIO),
    "ftruncate,fallocate,mkdir,mkdirat": (errno.ENOSPC,),
}


@pytest.fixture
def server() -> Iterator[ForkServer]:
    """A server of one test: after a failure, its next answer may be that of a command before."""
    with fork_server() as server:
        yield server


def traced(
    server: ForkServer, command: str, sandbox: Path, calls: str, fault: str, log: Path
) -> tuple[int, str]:
    """Run a command in a process of its own with a fault of a system call; return exit code and stderr."""
    words = [PROMPT if word == "PROMPT" else word for word in COMMANDS[command].split()]
    environment = {**os.environ, "CARRYALL_CACHE": str(sandbox / "cache")}
    errors, stderr = os.pipe()
    with open(os.devnull, "r+b") as null:
        streams = (null.fileno(), null.fileno(), stderr)
        process = server.start(words, sandbox, environment, stop_here, streams)
    os.close(stderr)
    status = Path(f"/proc/{process}/status")
    while not re.search(r"^State:\sT", status.read_text(), re.M):
        time.sleep(0.01)
    options = ["-f", "-qq", "-o", str(log), "-e", f"trace={calls}", "-e", fault, "-p", str(process)]
    with subprocess.Popen(["strace", *options], stderr=subprocess.PIPE, text=True) as strace:
        while re.search(r"^TracerPid:\s0$", status.read_text(), re.M):
            if strace.poll() is not None:
                os.kill(process, signal.SIGKILL)
                server.wait(process, 10)
                pytest.skip(f"this machine does not let strace trace: {strace.communicate()[1]}")
            time.sleep(0.01)
        os.kill(process, signal.SIGCONT)
        code = server.wait(process, 120)
        strace.communicate()
    with open(errors) as file:
        return code, file.read()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("strace"), reason="strace injects the faults; it is not installed")
@pytest.mark.parametrize("calls", SYSTEM_CALLS)
@pytest.mark.parametrize("command", ["export int4", "optimize a file", "quantize", "write KV", "batch run"])
def test_faults_of_the_kernel(
    command: str,
    calls: str,
    server: ForkServer,
    sandbox: Path,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
) -> None:
    """A real process, whose system call number N fails, wherever it is made: also in libraries in C."""
    whole = {name: content for name, content in undisturbed.items() if name != "stdout"}
    for number in SYSTEM_CALLS[calls]:
        for place in (1, 2, 4, 9, 20):
            fresh(sandbox)
            fault = f"inject={calls}:error={errno.errorcode[number]}:when={place}"
            log = tmp_path / "calls"
            code, stderr = traced(server, command, sandbox, calls, fault, log)
            shown = f"{command}, {calls} {place}: {code} {stderr}"
            assert code in (0, 1, 2), shown
            assert "Traceback" not in stderr, shown
            assert "INJECTED" in log.read_text() or not code, shown
            if code:
                lines = [line for line in stderr.splitlines() if not line.startswith("warning: ")]
                assert [line[:7] for line in lines] in (["error: "], []), shown  # stderr itself may fail
            assert files(sandbox) in ({}, whole), shown
            if "INJECTED" not in log.read_text():
                break
