"""A child process that holds a runner: calls and arrays pass through pipes."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ... import __version__, errors
from ...errors import CarryallError, ProviderRuntimeError
from ...storage.cache import FORMAT
from .. import get_provider
from ..base import Runner, RunnerConfig, RunnerInfo
from ..numa import NumaNode, bind

_CLOSE_SECONDS = 10


class RunnerProcess:
    """The parent's end: ``begin`` sends a call, ``end`` waits for its result.

    The first call is (provider, model, config, node), where the node is a ``NumaNode`` or None; its result is
    for ``opened_info``. Others are (method, *arguments).

    Args:
        variables: environment variables of the child, beside the parent's own.

    Attributes:
        kv_bytes: memory of the child's KV cache as of its last answer, in bytes.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self.kv_bytes = 0
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(variables or {})},
        )

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    @property
    def results(self) -> BinaryIO:
        """The pipe that can be read when a result, or the child's end, is there."""
        return self._pipes()[1]

    def call(self, *message: Any) -> Any:
        """Send a call and return its result; see ``begin`` and ``end``."""
        self.begin(*message)
        return self.end()

    def begin(self, *message: Any) -> None:
        """Send a call.

        Raises:
            ProviderRuntimeError: the child ended.
        """
        calls, _ = self._pipes()
        try:
            pickle.dump(message, calls, protocol=pickle.HIGHEST_PROTOCOL)
            calls.flush()
        except (OSError, ValueError) as error:
            raise self._ended() from error

    def end(self) -> Any:
        """Return the result of the call that was sent.

        Raises:
            ProviderRuntimeError: the child ended.
            CarryallError: the call raised it in the child.
        """
        _, results = self._pipes()
        try:
            kind, value, self.kv_bytes = pickle.load(results)  # noqa: S301 -- our own child
        except (EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
            raise self._ended() from error
        if kind is None:
            return value
        fault = CarryallError.__new__(getattr(errors, kind, ProviderRuntimeError))
        fault.args = (value,)
        raise fault

    def alive(self) -> bool:
        """Whether the child has not ended."""
        return self._child.poll() is None

    def kill(self) -> None:
        """End the child at once."""
        self._child.kill()

    def close(self) -> None:
        """End the child."""
        calls, results = self._pipes()
        with contextlib.suppress(BrokenPipeError):  # the child has already ended
            calls.close()  # the child ends at the end of its input
        try:
            self._child.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        results.close()

    def _ended(self) -> ProviderRuntimeError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(1)  # its pipes close a little before it has an exit code
        code = self._child.poll()
        state = "is closed or does not answer" if code is None else f"ended with exit code {code}"
        return ProviderRuntimeError(f"the runner's process {self._child.pid} {state}")

    def _pipes(self) -> tuple[BinaryIO, BinaryIO]:
        calls, results = self._child.stdin, self._child.stdout
        if calls is None or results is None:
            raise ProviderRuntimeError("the runner's process has no pipes")
        return calls, results  # type: ignore[return-value]  # typeshed calls them IO[bytes]


def software() -> str:
    """Return what processes of one model must have in common to understand each other."""
    return f"carryall {__version__}, format {FORMAT}"


def opened_info(opened: tuple[RunnerInfo, str], what: str) -> RunnerInfo:
    """Return the facts of a runner in a process.

    Args:
        opened: the result of the first call.
        what: the process, for the message.

    Raises:
        ProviderRuntimeError: it runs another version.
    """
    info, theirs = opened
    if theirs != software():
        raise ProviderRuntimeError(
            f"{what} runs {theirs}, and this process {software()}, since carryall was updated after its "
            "start; restart it"
        )
    return info


def serve(calls: BinaryIO, results: BinaryIO) -> None:
    """Run the child: load a runner by the first message, then carry out calls until the input ends."""
    runner: Runner | None = None
    while True:
        try:
            message = pickle.load(calls)  # noqa: S301 -- our own parent
        except EOFError:
            break
        reply: tuple[str | None, Any]
        held = 0
        try:
            if runner is None:
                runner = _opened(*message)
                reply = (None, (runner.info, software()))
            else:
                result = getattr(runner, message[0])(*message[1:])
                if message[0] == "forward":
                    result = result, [row.last_hidden_states for row in message[1]]
                reply = (None, result)
            held = runner.kv_bytes
        except CarryallError as error:
            reply = (type(error).__name__, str(error))
        try:
            pickle.dump((*reply, held), results, protocol=pickle.HIGHEST_PROTOCOL)
            results.flush()
        except BrokenPipeError:
            break  # the parent has ended, or has given up
    if runner is not None:
        runner.close()


def _opened(provider: str, model: Path, config: RunnerConfig, node: NumaNode | None) -> Runner:
    if node is not None:
        try:
            bind(node)
        except OSError as error:
            raise ProviderRuntimeError(
                f"a rank cannot be bound to NUMA node {node.number}: {error}"
            ) from error
    return get_provider(provider).runner(model, config)


if __name__ == "__main__":
    # Libraries that print to stdout must not corrupt the replies.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, replies)
