"""A service over the hosts of a Ray cluster, by replicas or by stages of layers: one loses its power."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import openai
import pytest
from hosts import Host, Network, network

SECONDS = 300.0
EVERY = "0.0.0.0"  # noqa: S104 -- in the network of the test
PYTHON = sys.executable
PROGRAMS = Path(PYTHON).parent
ENVIRONMENT = {
    **os.environ,
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A cluster that others reach needs a secret; each host has it.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "c" * 64,
    # For a busy machine; see docs/deploy.md.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # By default Ray waits up to 65 s for a host that is silent.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
}
EXPORT = """
import tempfile
from pathlib import Path
from carryall.exporter.demo import demo_path
from carryall.exporter.export import export_package
package = Path(tempfile.mkdtemp(), "toy")
export_package(demo_path("pycoder"), package)
print(package)
"""
CPUS = "import ray; ray.init('auto', log_to_driver=False); print(ray.cluster_resources().get('CPU', 0))"
REPLICA, STAGE = "ServeReplica:carryall:replica", "ray::StageActor"
WORDS = "def function_{}(first, second, third):\n    return first + second + third"


def until(found: Callable[[], Any]) -> Any:
    """What a function finds, once that is true."""
    end = time.monotonic() + SECONDS
    while not (value := found()):
        assert time.monotonic() < end, "it took too long"
        time.sleep(1)
    return value


def join(host: Host, *arguments: str) -> subprocess.Popen[str]:
    """Start Ray on a host."""
    command: list[str | Path] = [
        PROGRAMS / "ray",
        "start",
        "--block",
        "--node-ip-address",
        host.address,
        *arguments,
    ]
    return host.start(*command, "--object-store-memory", "100000000", env=ENVIRONMENT, stdout=DEVNULL)


@pytest.fixture
def cluster() -> Iterator[tuple[Host, list[Host]]]:
    """A head without processors, and two hosts with two each."""
    pytest.importorskip("ray.serve")
    if Path(PYTHON).is_relative_to("/tmp"):
        pytest.skip(f"the hosts have a /tmp of their own, and would not find {PYTHON}")
    with network() as net:
        yield started(net)


def started(net: Network) -> tuple[Host, list[Host]]:
    head, *others = (net.host() for _ in range(3))
    join(head, "--head", "--num-cpus", "0", "--include-dashboard", "false")
    until(lambda: cpus(head) is not None)
    joining = {host: join_head(host, head) for host in others}

    def complete() -> bool:
        for host, process in joining.items():
            if process.poll() is not None:  # Ray gives up after 30 s, which a busy machine may need
                joining[host] = join_head(host, head)
        return cpus(head) == 4

    until(complete)
    return head, others


def join_head(host: Host, head: Host) -> subprocess.Popen[str]:
    """Start Ray on a host with two processors."""
    return join(host, "--address", f"{head.address}:6379", "--num-cpus", "2")


def cpus(host: Host) -> float | None:
    """The processors of the cluster; None while there is no cluster."""
    with host.start(PYTHON, "-c", CPUS, env=ENVIRONMENT, stdout=PIPE, stderr=PIPE) as asked:
        out, _ = asked.communicate(timeout=SECONDS)
    return float(out) if asked.returncode == 0 else None


@contextmanager
def served(head: Host, *options: str) -> Iterator[None]:
    """A service of a model whose files only the head has."""
    package = head.run(PYTHON, "-c", EXPORT, env=ENVIRONMENT).splitlines()[-1]
    command: list[str | Path] = [PROGRAMS / "carryall", "serve", package, *options]
    # Popen's own context would wait for ever if a test fails; its network ends the host then.
    process = head.start(*command, "--host", EVERY, "--json", env=ENVIRONMENT, stdout=PIPE)
    assert process.stdout is not None
    with process.stdout as lines:
        line = next((line for line in lines if line.startswith("{")), "")
        assert json.loads(line or "{}").get("http") == f"{EVERY}:8000", "the command ended before it served"
        yield
        (leader,) = head.processes("bin/carryall")
        os.kill(int(leader.name), 15)
        assert process.wait(SECONDS) == 0


def cached(host: Host, text: str, session: str | None = None) -> int:
    """How many tokens of a text the replica that answered had in its cache."""
    headers = {"x-session-id": session} if session else {}
    with openai.OpenAI(
        base_url=f"http://{host.address}:8000/v1", api_key="none", max_retries=0, timeout=SECONDS
    ) as client:
        answer = client.completions.create(model="toy", prompt=text, max_tokens=2, extra_headers=headers)
    assert answer.usage
    assert answer.usage.prompt_tokens_details
    return answer.usage.prompt_tokens_details.cached_tokens or 0


class Caller:
    """Sends a request of its session each second, and notes the seconds of each answer."""

    def __init__(self, host: Host, session: str) -> None:
        self.seconds: list[float] = []
        self.errors: list[Exception] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(host, session), daemon=True)
        self._thread.start()

    def _run(self, host: Host, session: str) -> None:
        while not self._ended.wait(1):
            start = time.monotonic()
            try:
                cached(host, WORDS, session)
            except Exception as error:  # noqa: BLE001 -- the test asserts that there are none
                self.errors.append(error)
            self.seconds.append(time.monotonic() - start)

    def go_on(self) -> None:
        """Wait for three more answers."""
        count = len(self.seconds) + 3
        until(lambda: len(self.seconds) >= count)

    def end(self) -> None:
        """Wait for the last answer."""
        self._ended.set()
        self._thread.join(SECONDS)


@pytest.mark.slow
def test_replicas_on_several_hosts_survive_the_loss_of_one(cluster: tuple[Host, list[Host]]) -> None:
    head, (lost, left) = cluster
    absent = head.start(
        PROGRAMS / "carryall", "serve", "no/such-model", "--ray", "auto",
        env={**ENVIRONMENT, "HF_HUB_OFFLINE": "1"}, stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    _, err = absent.communicate(timeout=SECONDS)
    assert absent.returncode == 1
    assert err.splitlines()[-1].startswith("error: Ray Serve cannot start the replicas: "), err
    assert "no/such-model" in err.splitlines()[-1]
    assert "Traceback" not in err

    with served(head, "--ray", "auto", "--replicas", "2"):
        assert [len(host.processes(REPLICA)) for host in (head, lost, left)] == [0, 1, 1]
        # A conversation finds its replica through the address of any host.
        for number, first in enumerate((head, lost, left, head)):
            text = WORDS.format(number)
            cold = cached(first, text)
            assert min(cached(host, text) for host in (head, lost, left)) > cold
        sessions = [f"s{number}" for number in range(12)]
        seen = [cached(head, "class Unknown:\n    value = 1\n", session) for session in sessions]
        assert seen.count(min(seen)) == 2, seen  # once on each host

        callers = [Caller(host, session) for session in sessions[:4] for host in (head, left)]
        for caller in callers:
            caller.go_on()
        lost.lose_power()
        until(lambda: len(left.processes(REPLICA)) == 2)
        for caller in callers:
            caller.go_on()
        for caller in callers:
            caller.end()
        assert [error for caller in callers for error in caller.errors] == []
        slowest = [max(caller.seconds) for caller in callers]
        print("slowest answer of each caller, in seconds:", [f"{each:.1f}" for each in slowest])
        assert max(slowest) < 60
        assert cached(left, WORDS, "s0") > 0


def text(host: Host, prompt: str) -> Iterator[str]:
    """Yield the pieces of a greedy answer of 200 tokens."""
    with openai.OpenAI(
        base_url=f"http://{host.address}:8000/v1", api_key="none", max_retries=0, timeout=SECONDS
    ) as client:
        for event in client.completions.create(
            model="toy", prompt=prompt, max_tokens=200, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        ):  # fmt: skip
            assert event.choices[0].finish_reason in (None, "length")
            yield event.choices[0].text


@pytest.mark.slow
def test_stages_on_several_hosts_survive_the_loss_of_one(cluster: tuple[Host, list[Host]]) -> None:
    """Its model's files are on the head only: each stage is sent its own."""
    head, (lost, left) = cluster
    options = ("--pipeline", "auto", "--pipeline-stages", "2", "--num-threads", "1", "--http-port", "8000")
    with served(head, *options, "--grpc-port", "none"):
        assert [len(host.processes(STAGE)) for host in (head, lost, left)] == [0, 1, 1]
        expected = "".join(text(head, WORDS))
        pieces = []
        for piece in text(head, WORDS):
            pieces.append(piece)
            if len(pieces) == 5:
                lost.lose_power()
        assert "".join(pieces) == expected  # one stream, through the loss
        assert len(left.processes(STAGE)) == 2
        assert "".join(text(head, WORDS)) == expected
