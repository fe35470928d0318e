"""Run the operators of the CPU kernels in ``operator_host.cpp``: another process, without onnxruntime."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from carryall.providers.native.compiler import COMMON, SOURCES

Array = npt.NDArray[Any]
SOURCE = Path(__file__).with_name("operator_host.cpp")
_TYPES = {np.dtype(np.float32): 1, np.dtype(np.uint8): 2, np.dtype(np.int32): 6, np.dtype(np.int64): 7}


@dataclass
class Call:
    """A node and its inputs.

    Args:
        name: the operator.
        attributes: integers and floats.
        inputs: arrays; None is an absent one.
        threads: threads of the run.
        copies: runs at the same time on one kernel.
    """

    name: str
    attributes: Mapping[str, int | float]
    inputs: Sequence[Array | None]
    threads: int = 1
    copies: int = 1

    def encoded(self) -> bytes:
        """Return what the host reads."""
        parts = [_text(self.name), struct.pack("<3I", self.threads, self.copies, len(self.attributes))]
        for name, value in self.attributes.items():
            kind, form = (1, "<Id") if isinstance(value, float) else (0, "<Iq")
            parts += [_text(name), struct.pack(form, kind, value)]
        parts.append(struct.pack("<I", len(self.inputs)))
        for array in self.inputs:
            if array is None:
                parts.append(struct.pack("<2IQ", 0, 0, 0))
                continue
            form, kind = f"<2I{array.ndim}qQ", _TYPES[array.dtype]
            parts.append(struct.pack(form, kind, array.ndim, *array.shape, array.nbytes))
            parts.append(array.tobytes())
        return b"".join(parts)


class RefusedError(Exception):
    """An operator refused its attributes or inputs."""


class CrashedError(Exception):
    """The host ended while it computed."""


class OperatorHost:
    """A process that runs operators.

    Args:
        command: starts the host, its library included.
        environment: added to that of this process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )

    def __enter__(self) -> OperatorHost:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, call: Call) -> npt.NDArray[np.float32]:
        """Return the first output of a call; see ``outputs``."""
        return self.outputs(call)[0]

    def outputs(self, call: Call) -> list[npt.NDArray[np.float32]]:
        """Return the outputs of a call.

        Raises:
            RefusedError: the operator refused the call.
            CrashedError: the host ended; the message is what it wrote.
        """
        sent, answers = self._process.stdin, self._process.stdout
        assert sent is not None
        assert answers is not None
        try:
            sent.write(call.encoded())
            sent.flush()
        except BrokenPipeError:
            raise self._crash() from None
        failed, count = struct.unpack("<2I", self._read(8))
        if failed:
            raise RefusedError(self._read(count).decode())
        return [self._output() for _ in range(count)]

    def _output(self) -> npt.NDArray[np.float32]:
        (size,) = struct.unpack("<I", self._read(4))
        shape = struct.unpack(f"<{size}q", self._read(8 * size))
        return np.frombuffer(self._read(4 * int(np.prod(shape))), np.float32).reshape(shape)

    def end(self) -> str:
        """Let the process end and return what it wrote to its standard error.

        Raises:
            CrashedError: it fails.
        """
        _, errors = self._process.communicate()
        if self._process.returncode:
            raise CrashedError(errors.decode()[-5000:])
        return errors.decode()

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) < size:
            raise self._crash()
        return data

    def _crash(self) -> CrashedError:
        _, errors = self._process.communicate()
        return CrashedError(f"exit code {self._process.returncode}: {errors.decode()[-5000:]}")


def build_host(compiler: Sequence[str], target: Path, *flags: str) -> Path:
    """Build the host; skip without a compiler, where the library was installed with one that is gone."""
    if not compiler:
        pytest.skip("there is no C++ compiler")
    command = [*compiler, *COMMON[:1], "-O1", f"-I{SOURCES}", *flags, str(SOURCE), "-o", str(target)]
    subprocess.run([*command, "-pthread", "-ldl"], check=True, capture_output=True, text=True)
    return target


def _text(text: str) -> bytes:
    return struct.pack("<I", len(text)) + text.encode()
