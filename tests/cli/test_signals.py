"""Signals to real processes: they end soon, with the documented exit code and without a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from carryall.cli.batch_run import stopping
from carryall.proto import generation_pb2 as pb
from carryall.proto import sampling_pb2, service_pb2_grpc

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")

PATIENCE = 60
LONG = ["--max-tokens", "900"]
NOISE = (
    "Traceback",
    "CancelledError",
    "Event loop is closed",
    "never retrieved",
    "Exception ignored",
    "FATAL",
)


# A test run in the background ignores SIGINT, which its children would inherit.
MAIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[0] = "carryall"
from carryall.cli import main
main()
"""


def start(*arguments: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", MAIN, *arguments], stdin=pipe, stdout=pipe, stderr=pipe)


def end(process: subprocess.Popen[bytes], numbers: Sequence[int]) -> tuple[int, str]:
    """Send signals half a second apart; return the exit code and stderr of the process."""
    try:
        for place, number in enumerate(numbers):
            time.sleep(0.5 * (place > 0))
            process.send_signal(number)
        _, stderr = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    text = stderr.decode()
    assert not [noise for noise in NOISE if noise in text], text
    return process.returncode, text


def wait_for_output(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stdout.read(1)


TWICE = [signal.SIGINT, signal.SIGINT]
INTERRUPTED = (130, -signal.SIGINT)


@pytest.mark.long
@pytest.mark.parametrize("numbers", [[signal.SIGINT], TWICE])
def test_run(numbers: list[int]) -> None:
    process = start("run", "demo", "def f(", "-q", *LONG, "--temperature", "1", "--stop", "@@@@@")
    wait_for_output(process)
    code, _ = end(process, numbers)
    assert code in (*INTERRUPTED, 0)


@pytest.mark.long
@pytest.mark.parametrize("numbers", [[signal.SIGINT], TWICE])
def test_batch(numbers: list[int], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    short = {"prompt": "def f(", "max_tokens": 1}
    long = {"prompt": "def f(", "max_tokens": 900, "temperature": 1.0, "ignore_eos": True}
    source.write_text("\n".join(map(json.dumps, [short, *[long] * 200])))
    process = start("batch", "run", str(source), "-o", "-", "--model", "demo", "-q")
    wait_for_output(process)
    code, _ = end(process, numbers)
    assert code in INTERRUPTED


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_the_second_signal_ends_a_batch_job_at_once(number: int, error: type[BaseException]) -> None:
    """Its exit code tells which signal it was: 130 or 143."""
    with stopping() as (stop, code):
        signal.raise_signal(number)
        assert stop.is_set()
        assert code() == 128 + number
        with pytest.raises(error) as ended:
            signal.raise_signal(number)
    assert getattr(ended.value, "code", 128 + number) == 128 + number


def test_an_ignored_signal_does_not_stop_a_batch_job() -> None:
    """As of a script's background job when Ctrl-C ends the script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stopping() as (stop, _):
        signal.raise_signal(signal.SIGINT)
        assert not stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()


@pytest.mark.long
def test_serve_in_the_background_of_a_script() -> None:
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", "carryall", "serve", "demo"]
    process = subprocess.Popen(
        [*ignoring, "--grpc-port", "0", "--http-port", "none", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    code, _ = end(process, [signal.SIGTERM])
    assert code == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("numbers", "grace", "codes"),
    [
        ([signal.SIGTERM], "0.1", (0,)),
        (TWICE, "30", (130, -signal.SIGINT)),
    ],
)
def test_serve_with_a_request_in_progress(numbers: list[int], grace: str, codes: tuple[int, ...]) -> None:
    process = start("serve", "demo", "--grpc-port", "0", "--http-port", "none", "--grace", grace, "--json")
    assert process.stdout is not None
    address = json.loads(process.stdout.readline())["grpc"]
    with grpc.insecure_channel(address) as channel:
        sampling = sampling_pb2.SamplingOptions(max_tokens=100_000, ignore_eos=True)
        stub = service_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        calls = [stub.Generate(pb.GenerateRequest(text="x", sampling=sampling)) for _ in range(30)]
        next(iter(calls[0]))
        code, _ = end(process, numbers)
        for call in calls:
            call.cancel()
    assert code in codes


@pytest.mark.long
def test_serve_while_it_loads() -> None:
    process = start("serve", "demo", "--grpc-port", "0", "--http-port", "none", "--json")
    time.sleep(2)
    code, _ = end(process, [signal.SIGTERM])
    assert code in (0, -signal.SIGTERM)


THREADS = """
import logging, sys, threading, time
logging.disable(logging.WARNING)  # a machine without kernels is told so
from carryall.runtime.api.llm import LLM
from carryall.runtime.types.sampling_params import SamplingParams
llm = LLM("demo", max_slots=4)
started = threading.Barrier(5)
def work(i):
    llm.generate("x", SamplingParams(max_tokens=1))
    started.wait()
    while True:
        llm.generate(f"def f{i}(x):" * 40, SamplingParams(temperature=1.0, max_tokens=40, stop=["zz"]))
        llm.encode("abc def" * 2000)
for i in range(4):
    threading.Thread(target=work, args=(i,), daemon=True).start()
started.wait()
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.long
@pytest.mark.parametrize("delay", [0.05, 0.33])
def test_the_interpreter_ends_while_daemon_threads_generate(delay: float) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", THREADS, str(delay)],
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
