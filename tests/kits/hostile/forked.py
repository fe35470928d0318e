"""Commands in forks of a process that has imported carryall: they start in 0.05 s instead of 2 s.

Each fork ends like a process of its own: it leaves the loop of the server, and the interpreter finalizes.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path


class ForkServer:
    """A process that imported the modules of all verbs and forks one child for each command."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
            )

    def start(
        self,
        words: Sequence[str],
        folder: Path,
        environment: dict[str, str],
        prepare: Callable[[], None],
        streams: tuple[int, int, int],
    ) -> int:
        """Run ``carryall`` with arguments; return the process id.

        Args:
            words: the arguments.
            folder: the working folder.
            environment: all environment variables.
            prepare: called in the child before the program; it must be importable.
            streams: stdin, stdout and stderr.
        """
        message = pickle.dumps((list(words), str(folder), environment, prepare))
        socket.send_fds(self._socket, [len(message).to_bytes(4, "little")], list(streams))
        self._socket.sendall(message)
        return int(json.loads(self._socket.recv(100)))

    def wait(self, process: int, seconds: float, *, kill: bool = True) -> int:
        """Return the exit code of a child; negative for a signal. A child that takes longer may be killed.

        Raises:
            TimeoutError: the child takes longer.
        """
        self._socket.settimeout(seconds)
        try:
            return int(json.loads(self._socket.recv(100)))
        except TimeoutError:
            if not kill:
                raise
            os.kill(process, signal.SIGKILL)
            self._socket.settimeout(10)
            self._socket.recv(100)
            raise

    def close(self) -> None:
        """End the server."""
        self._socket.close()
        self._process.wait(10)


@contextlib.contextmanager
def fork_server() -> Iterator[ForkServer]:
    """A server that ends with the block."""
    server = ForkServer()
    try:
        yield server
    finally:
        server.close()


def stop_here() -> None:
    """Stop the child, a ``prepare`` for ``start``: another process traces it and lets it continue."""
    os.kill(os.getpid(), signal.SIGSTOP)


def _import_all() -> None:
    import importlib
    import pkgutil

    import carryall.cli.verbs

    for found in pkgutil.iter_modules(carryall.cli.verbs.__path__, "carryall.cli.verbs."):
        importlib.import_module(found.name)
    for name in ("onnxruntime", "tokenizers", "onnx_ir", "jinja2", "onnx"):
        importlib.import_module(name)


def _receive(requests: socket.socket) -> tuple[bytes, list[int]] | None:
    size, streams, _, _ = socket.recv_fds(requests, 4, 3)
    if not size:
        return None
    message = b""
    while len(message) < int.from_bytes(size, "little"):
        message += requests.recv(1 << 20)
    return message, streams


def _serve(requests: socket.socket) -> list[str]:
    """Fork for each message; return the arguments in each child, and end at the end of the messages."""
    while found := _receive(requests):
        message, streams = found
        child = os.fork()
        if not child:
            words, folder, environment, prepare = pickle.loads(message)  # noqa: S301 -- of the tests
            requests.close()
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            prepare()
            _open_streams()
            arguments: list[str] = words
            return arguments
        for stream in streams:
            os.close(stream)
        requests.sendall(json.dumps(child).encode())
        _, status = os.waitpid(child, 0)
        time.sleep(0.01)  # two messages, not one
        requests.sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _open_streams() -> None:
    """Open Python's standard streams as the interpreter does: None for a descriptor that is closed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            stream = None
        else:
            mode, errors = ("w", "backslashreplace") if number == 2 else ("w" if number else "r", "strict")
            stream = open(number, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    _import_all()
    with socket.socket(fileno=int(sys.argv[1])) as end:
        words = _serve(end)
    sys.argv = ["carryall", *words]
    from carryall.cli import main

    main()
