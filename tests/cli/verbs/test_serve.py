"""``carryall serve`` as a process: ready line, a real client, signals and failures."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import types
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import trustme
from certificates import write_certificate
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from carryall import LLM, SamplingParams
from carryall.cli import carryall
from carryall.proto import generation_pb2 as pb
from carryall.proto import sampling_pb2, service_pb2_grpc

FREE = ("--grpc-port", "0", "--http-port", "0")
PROMPT, TOKENS = "def fibonacci(n):", 200


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@contextmanager
def service(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "carryall", "serve", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_the_ready_line_of_an_encrypted_service_says_https(tmp_path: Path) -> None:
    certificate, key = write_certificate(trustme.CA(), tmp_path)
    files = "--tls-certificate", str(certificate), "--tls-key", str(key)
    with service("demo", "--http-port", "0", "--grpc-port", "none", *files) as process:
        assert process.stdout is not None
        assert "https://127.0.0.1:" in process.stdout.readline()


@pytest.mark.long
def test_the_embedded_model_streams_and_sigterm_drains() -> None:
    with service("demo", *FREE, "--json", "--max-slots", "2") as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert (ready["event"], ready["model"], ready["provider"]) == ("ready", "demo", "cpu")
        with urllib.request.urlopen(f"http://{ready['http']}/v1/models", timeout=10) as answer:
            assert [model["id"] for model in json.load(answer)["data"]] == ["demo"]
        with grpc.insecure_channel(ready["grpc"]) as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            stub = service_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
            sampling = sampling_pb2.SamplingOptions(temperature=0, max_tokens=TOKENS, ignore_eos=True)
            stream = stub.Generate(pb.GenerateRequest(text=PROMPT, sampling=sampling), timeout=60)
            messages = [next(stream)]
            process.send_signal(signal.SIGTERM)
            messages += stream
        assert process.wait(timeout=30) == 0
    assert messages[-1].usage.completion_tokens == TOKENS  # the open request was completed
    assert len(messages) > 2
    with LLM("demo", max_slots=2) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        expected = llm.generate(PROMPT, params)[0].outputs[0]
    assert "".join(message.text_delta for message in messages) == expected.text
    assert [token for message in messages for token in message.token_ids] == expected.token_ids


def test_a_taken_port_is_one_line_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(
            carryall, ["serve", "no-such-model", "--http-port", "none", "--grpc-port", str(port)]
        )
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: cannot listen on 127.0.0.1:{port}" in result.stderr


def test_a_taken_port_for_http_is_named_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = ["--grpc-port", "none", "--http-port", str(port)]
        result = CliRunner().invoke(carryall, ["serve", "no-such-model", *ports])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: cannot listen on 127.0.0.1:{port}" in result.stderr
    assert "--http-port" in result.stderr


@pytest.mark.long
def test_grpc_prints_nothing_of_its_own_about_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = ["--http-port", "none", "--grpc-port", str(taken.getsockname()[1])]
        command = [sys.executable, "-m", "carryall", "serve", "no-such-model", *ports]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["error"]


def test_a_model_that_is_not_there_is_one_line() -> None:
    result = CliRunner().invoke(carryall, ["serve", "no-such-model", *FREE])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no-such-model" in result.stderr


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    for name in [
        name for name in sys.modules if name.startswith(("carryall.runtime.service.", "carryall.proto."))
    ]:
        monkeypatch.delitem(sys.modules, name)
    result = CliRunner().invoke(carryall, ["serve", "demo"])
    assert result.exit_code == 2
    assert "pip install 'carryall[service]'" in result.stderr


def test_packages_of_grpc_that_do_not_fit_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As generated code says it at import."""

    class Newer(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(
                "The grpc package installed is at version 1.84.0, but the generated code in "
                "health_pb2_grpc.py depends on grpcio>=1.85.1. Please upgrade your grpc module."
            )

    monkeypatch.setitem(sys.modules, "carryall.runtime.service.serve", Newer("serve"))
    result = CliRunner().invoke(carryall, ["serve", "demo"])
    assert result.exit_code == 2
    assert "depends on grpcio>=1.85.1. Install those that do with: pip install --upgrade" in result.stderr
