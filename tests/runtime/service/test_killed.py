"""A service that is killed starts again on its ports and answers as before."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

ASK = {"prompt": "def f(x):", "max_tokens": 8, "temperature": 0}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def service(folder: Path, http: int, grpc: int) -> Iterator[subprocess.Popen[bytes]]:
    """A service of the embedded model on these ports, killed at the end."""
    command = [sys.executable, "-m", "carryall", "serve", "demo", "--json"]
    command += ["--http-port", str(http), "--grpc-port", str(grpc)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=folder) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert (ready["http"], ready["grpc"]) == (f"127.0.0.1:{http}", f"127.0.0.1:{grpc}")
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_killed_service_starts_again_on_its_ports(tmp_path: Path) -> None:
    http, grpc = free_port(), free_port()
    endless = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    texts = []
    with httpx2.Client(base_url=f"http://127.0.0.1:{http}/v1", timeout=60) as client:
        for _ in range(2):
            with service(tmp_path, http, grpc) as process:
                texts.append(client.post("/completions", json=ASK).json()["choices"][0]["text"])
                with client.stream("POST", "/completions", json=endless) as answer:
                    pieces = answer.iter_raw()
                    next(pieces)
                    process.send_signal(signal.SIGKILL)
                    with pytest.raises(httpx2.TransportError):  # told at once, not after a timeout
                        list(pieces)
    assert texts[0] == texts[1] != ""
