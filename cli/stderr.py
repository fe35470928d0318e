"""stderr that cannot be written, such as a file on a full disk, must not change the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast


@contextmanager
def lenient_stderr() -> Iterator[None]:
    """Discard what is written to ``sys.stderr`` from the first write on that fails."""
    before = sys.stderr
    if before is None:  # Windows programs without a console
        yield
        return
    sys.stderr = cast("TextIO", _Lenient(before))
    try:
        yield
    finally:
        sys.stderr.flush()
        sys.stderr = before


def discard(stream: TextIO) -> None:
    """Discard what a stream could not write: else the interpreter writes it again, and exits with 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Lenient:
    """A text stream whose writes never fail."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            discard(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            discard(self._stream)
