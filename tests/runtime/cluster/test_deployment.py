"""``carryall serve --ray`` on a real Ray cluster of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from click.testing import CliRunner

from carryall.cli import carryall
from carryall.errors import UsageError
from carryall.exporter.demo import demo_path
from carryall.exporter.export import export_package
from carryall.runtime.cluster import deployment
from carryall.runtime.cluster.replica import ReplicaSpec
from carryall.runtime.engine.config import EngineConfig
from carryall.runtime.models.config import ModelConfig
from carryall.runtime.service.core.config import ServerConfig

SECONDS = 300.0


def test_replicas_need_a_cluster() -> None:
    with pytest.raises(UsageError, match="without ray"):
        ServerConfig(replicas=2)


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(carryall, ["serve", "demo", "--ray", "local"])
    assert done.exit_code != 0
    assert "carryall[ray]" in done.output


class Cluster:
    """The resources of a cluster."""

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 3}, "3 replicas need 3 CPUs, but this machine has 2; choose fewer --replicas"),
        ({"replicas": 2, "replica_gpus": 0.5}, "2 replicas need 1 GPUs, but this machine has 0"),
    ],
)
def test_replicas_that_would_wait_forever_are_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(deployment, "connect", lambda address: Cluster())
    spec = ReplicaSpec("toy", ModelConfig(model="demo"), EngineConfig(), ServerConfig(ray="local", **options))
    with pytest.raises(UsageError, match=message):
        deployment.deploy(spec)


@pytest.mark.parametrize(("address", "by_grpc"), [("local", "1"), ("auto", None)])
def test_the_proxy_calls_by_grpc_on_one_machine_only(
    monkeypatch: pytest.MonkeyPatch, address: str, by_grpc: str | None
) -> None:
    """Calls by gRPC to a machine that fell silent fail late."""

    def connect(address: str) -> Cluster:
        raise UsageError(f"there is no Ray cluster at {address}")

    monkeypatch.setenv("RAY_SERVE_PROXY_USE_GRPC", "")  # so that it is restored
    monkeypatch.delenv("RAY_SERVE_PROXY_USE_GRPC")
    monkeypatch.setattr(deployment, "connect", connect)
    spec = ReplicaSpec("toy", ModelConfig(model="demo"), EngineConfig(), ServerConfig(ray=address))
    with pytest.raises(UsageError, match="no Ray cluster"):
        deployment.deploy(spec)
    assert os.environ.get("RAY_SERVE_PROXY_USE_GRPC") == by_grpc


MESSAGE = """The deployment failed to start 3 times in a row. Error:
ray::ServeReplica:carryall:replica.initialize_and_get_metadata()
  raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
carryall.errors.ModelNotFoundError: no model 'no/such-model'
See the logs for more information.
"""


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (MESSAGE, "carryall.errors.ModelNotFoundError: no model 'no/such-model'"),
        ("It failed.", "see the logs of Ray"),
    ],
)
def test_the_reason_of_a_failed_deployment_is_its_last_error(message: str, reason: str) -> None:
    part = types.SimpleNamespace(status="DEPLOY_FAILED", message=message)
    fine = types.SimpleNamespace(status="HEALTHY", message="RuntimeError: an old one")
    application = types.SimpleNamespace(deployments={"replica": part, "front": fine})
    serve = types.SimpleNamespace(
        status=lambda: types.SimpleNamespace(applications={"carryall": application})
    )
    assert deployment._reason(serve) == reason


@pytest.mark.parametrize("option", [{"models": "m"}, {"batch_folder": "b"}, {"shared_memory": True}])
def test_options_that_need_one_process_are_refused(option: dict[str, Any]) -> None:
    server = ServerConfig(ray="local", **option)
    spec = ReplicaSpec("toy", ModelConfig(model="demo"), EngineConfig(), server)
    with pytest.raises(UsageError, match="cannot be used with --ray"):
        deployment.deploy(spec)


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """Yield the URL of a service on a cluster of this machine, started by the command."""
    pytest.importorskip("ray.serve")
    model = folder / "model"
    export_package(demo_path("pycoder"), model)
    command = [sys.executable, "-m", "carryall", "serve", str(model), "--ray", "local", *options]
    environment = {**os.environ, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    # Ray's niceness of 15 and time of 5 s for its proxy are too much and too few on a busy machine.
    environment |= {"RAY_worker_niceness": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
    with subprocess.Popen(
        [*command, "--http-port", "0", "--json"], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("{")), "")
        assert line, "the command ended before it served"
        try:
            yield f"http://{json.loads(line)['http']}"
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The URL of a service of 2 replicas."""
    with serving(tmp_path, "--replicas", "2") as url:
        yield url


async def cached(client: httpx2.AsyncClient, text: str, **headers: str) -> int:
    """How many tokens of a text were found in the cache of the replica that answered."""
    body = {"prompt": text, "max_tokens": 2, "temperature": 0}
    answer = await client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.slow
def test_two_replicas_with_affinity(served: str) -> None:
    async def scenario() -> None:
        async with httpx2.AsyncClient(base_url=served, timeout=SECONDS) as client:
            texts = [f"def function_{n}(a, b, c):\n    return a + b + c  # {n}" for n in range(8)]
            first = [await cached(client, text) for text in texts]
            again = [await cached(client, text) for text in texts]
            assert all(b > a for a, b in zip(first, again, strict=True)), (first, again)
            # Other sessions go to both replicas, so some of them find nothing of a text that is new here.
            new = "class Unknown:\n    def __init__(self):\n        self.value = 1\n"
            seen = [await cached(client, new, **{"x-session-id": f"s{n}"}) for n in range(16)]
            cold = min(seen)
            assert seen.count(cold) == 2, seen  # once on each replica
            await streamed(client)
            await vanished(client)
            wrong = await client.post("/v1/completions", json={"prompt": 1})
            assert (wrong.status_code, "prompt" in wrong.text) == (400, True)
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "model"

    asyncio.run(scenario())


async def streamed(client: httpx2.AsyncClient) -> None:
    """A stream arrives in pieces, and equals the whole answer."""
    ask: dict[str, Any] = {"prompt": "def f(x):", "max_tokens": 16, "temperature": 0}
    whole = (await client.post("/v1/completions", json=ask)).json()["choices"][0]["text"]
    pieces = []
    async with client.stream("POST", "/v1/completions", json={**ask, "stream": True}) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
    assert len(pieces) > 1
    assert "".join(pieces) == whole


async def vanished(client: httpx2.AsyncClient) -> None:
    """A client that closes its connection ends its request on the replica."""
    same = {"x-session-id": "vanishing"}
    ask = {"prompt": "def f(x):", "n": 16, "max_tokens": 100_000, "ignore_eos": True, "stream": True}

    async def aborted() -> float:
        metrics = (await client.get("/metrics", headers=same)).text
        lines = [one for one in metrics.splitlines() if one.startswith("vllm:request_success_total{")]
        return sum(float(one.split()[-1]) for one in lines if 'finished_reason="abort"' in one)

    assert await aborted() == 0
    async with client.stream("POST", "/v1/completions", json=ask, headers=same) as stream:
        await anext(stream.aiter_bytes())
    async with asyncio.timeout(60):
        while not await aborted():
            await asyncio.sleep(0.2)


def replica_processes() -> list[psutil.Process]:
    """The processes of replicas, by the title that Ray gives them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or [""]
        if line[0].startswith("ray::ServeReplica:carryall:replica"):
            found.append(process)
    return found


async def ended_how(client: httpx2.AsyncClient, session: str) -> str:
    """How a stream of 400 tokens ends: "whole", "error" with a typed event, or "cut"."""
    ask = {"prompt": f"def {session}(x):", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    error = None
    async with client.stream(
        "POST", "/v1/completions", json={**ask, "stream": True}, headers={"x-session-id": session}
    ) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                error = event.get("error") or error
            if line == "data: [DONE]":
                return "whole"
    return "error" if error is not None and error["type"] == "server_error" else f"cut: {error}"


@pytest.mark.slow
def test_a_replica_is_added_while_work_waits_and_a_killed_one_ends_its_streams_only(tmp_path: Path) -> None:
    async def scenario(url: str) -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=SECONDS) as client:
            assert len(replica_processes()) == 1
            work = [asyncio.create_task(ended_how(client, f"grow{n}")) for n in range(40)]
            async with asyncio.timeout(SECONDS):
                while len(replica_processes()) < 2:
                    await asyncio.sleep(1)
                    work += [asyncio.create_task(ended_how(client, f"more{len(work)}"))]
            assert {await each for each in work} == {"whole"}
            await asyncio.sleep(20)  # until Ray routes to both
            streams = [asyncio.create_task(ended_how(client, f"s{n}")) for n in range(24)]
            await asyncio.sleep(1.5)
            replica_processes()[0].kill()
            ends = [await each for each in streams]
            assert set(ends) <= {"whole", "error"}, ends
            assert ends.count("error") > 0
            assert ends.count("whole") > 0
            assert await ended_how(client, "afterwards") == "whole"

    options = "--replicas", "1", "--max-replicas", "2", "--replica-tokens", "64", "--max-slots", "4"
    with serving(tmp_path, *options) as url:
        asyncio.run(scenario(url))
