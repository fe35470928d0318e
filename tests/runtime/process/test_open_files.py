"""Too many open files: the limit is raised where possible, connections wait, and one line says what to do."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from carryall.cli import carryall, group
from carryall.runtime.process import open_files

resource = pytest.importorskip("resource", reason="limits of POSIX")
FULL = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
MAIN = "import sys; sys.argv[0] = 'carryall'; from carryall.cli import main; main()"


def test_a_refused_connection_is_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        open_files.warn_of_refused_connections(loop)
        for _ in range(3):
            loop.call_exception_handler(
                {"message": "socket.accept() out of system resource", "exception": FULL}
            )
        loop.call_exception_handler({"message": "another fault", "exception": ValueError("x")})

    with caplog.at_level(logging.WARNING):
        asyncio.run(test())
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    waiting, other = (record.getMessage() for record in caplog.records)
    assert f"new connections wait: Too many open files; this process may open {limit} files" in waiting
    assert "ulimit -n" in waiting
    assert "another fault" in other


def test_an_error_of_a_command_says_what_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise FULL

    monkeypatch.setattr(group.VerbGroup, "get_command", fail)
    result = CliRunner().invoke(carryall, ["families"])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "Too many open files; this process may open" in result.stderr
    assert "raise that, such as with 'ulimit -n 4096'" in result.stderr


def test_the_limit_is_raised_as_far_as_allowed() -> None:
    code = (
        "import resource as r; from carryall.runtime.process.open_files import raise_open_files as go\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (20, 50)); go(); print(r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(50, 50)\n"


@pytest.mark.slow
def test_a_service_with_more_connections_than_files_lives_on() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    body = json.dumps({"model": "demo", "prompt": "def f", "max_tokens": 20, "stream": True})
    request = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    ).encode()
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, "serve", "demo", "--http-port", "0", "--grpc-port", "none", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=limit,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            host, port = ready["http"].split(":")
            connections = [socket.create_connection((host, int(port)), timeout=120) for _ in range(100)]
            for connection in connections:
                connection.sendall(request)
            for connection in connections:
                assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
                while connection.recv(65536):
                    pass
                connection.close()
            process.terminate()
            _, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert stderr.count("\n") == 1
    assert "this process may open 64 files and connections" in stderr
