"""A runner in a child process, with its own threads, allocator and driver; a crash ends only the child."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ... import errors
from ...errors import CarryallError, ProviderRuntimeError
from .. import get_provider
from ..base import KVEviction, Row, Runner, RunnerConfig, RunnerInfo

_CLOSE_SECONDS = 10


class ProcessRunner(Runner):
    """A ``Runner`` that forwards calls and arrays to a child process through pipes.

    Args:
        provider: the name of the child's provider.
        model: the lowered model, as for ``Provider.runner``.
        config: as for ``Provider.runner``.

    Raises:
        CarryallError: ``Provider.runner`` raised it in the child.
        ProviderRuntimeError: the child ended.
    """

    def __init__(self, provider: str, model: Path, config: RunnerConfig) -> None:
        self._held = 0  # bytes of KV as of the last answer
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            strict = dataclasses.replace(config, on_fallback=None)  # functions cannot be pickled
            info: RunnerInfo = self._call(provider, model, strict)
            # ``BestLogits`` have a function, so they cannot be pickled. Hidden states can: see ``forward``.
            self.info = dataclasses.replace(info, top_logits=0, steps_ahead=0)
        except CarryallError:
            self.close()
            raise

    def forward(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]:
        """Run one step; see ``Runner.forward``."""
        logits: list[npt.NDArray[np.float32]]
        logits, hidden_states = self._call("forward", list(rows))
        for row, states in zip(rows, hidden_states, strict=True):
            if row.last_hidden_states is not None:
                row.last_hidden_states[:] = states  # the child wrote into a copy
        return logits

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV cache as of the child's last answer, in bytes."""
        return self._held

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """See ``Runner.copy_prefix``."""
        self._call("copy_prefix", source, target, length)

    def release(self, slot: int) -> None:
        """See ``Runner.release``."""
        self._call("release", slot)

    def trim(self, slot: int, length: int) -> None:
        """See ``Runner``."""
        self._call("trim", slot, length)

    def evict_kv(self, slot: int, length: int, eviction: KVEviction) -> None:
        """See ``Runner``."""
        self._call("evict_kv", slot, length, eviction)

    def read_kv(self, slot: int, start: int, length: int) -> list[npt.NDArray[Any]]:
        """See ``Runner``."""
        parts: list[npt.NDArray[Any]] = self._call("read_kv", slot, start, length)
        return parts

    def write_kv(self, slot: int, start: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        """See ``Runner``."""
        self._call("write_kv", slot, start, length, list(parts))

    def close(self) -> None:
        """End the child. The runner cannot be used afterwards."""
        calls, results = self._pipes()
        with contextlib.suppress(BrokenPipeError):  # the child has already ended
            calls.close()  # the child ends at the end of its input
        try:
            self._child.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        results.close()

    def _call(self, *message: Any) -> Any:
        calls, results = self._pipes()
        try:
            pickle.dump(message, calls, protocol=pickle.HIGHEST_PROTOCOL)
            calls.flush()
            kind, value, self._held = pickle.load(results)  # noqa: S301 -- our own child
        except (EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
            code = self._child.poll()
            state = "is closed or does not answer" if code is None else f"ended with exit code {code}"
            raise ProviderRuntimeError(f"the runner's process {self._child.pid} {state}") from error
        if kind is None:
            return value
        fault = CarryallError.__new__(getattr(errors, kind, ProviderRuntimeError))
        fault.args = (value,)
        raise fault

    def _pipes(self) -> tuple[BinaryIO, BinaryIO]:
        calls, results = self._child.stdin, self._child.stdout
        if calls is None or results is None:
            raise ProviderRuntimeError("the runner's process has no pipes")
        return calls, results  # type: ignore[return-value]  # typeshed calls them IO[bytes]


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
                name, model, config = message
                runner = get_provider(name).runner(model, config)
                reply = (None, runner.info)
            else:
                result = getattr(runner, message[0])(*message[1:])
                if message[0] == "forward":
                    result = result, [row.last_hidden_states for row in message[1]]
                reply = (None, result)
            held = runner.kv_bytes
        except CarryallError as error:
            reply = (type(error).__name__, str(error))
        pickle.dump((*reply, held), results, protocol=pickle.HIGHEST_PROTOCOL)
        results.flush()
    if runner is not None:
        runner.close()


if __name__ == "__main__":
    # Libraries that print to stdout must not corrupt the replies.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, replies)
