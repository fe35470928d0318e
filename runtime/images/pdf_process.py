"""A child process in which PDFium draws, with limits on its processor time and its memory.

1,840 bytes whose forms draw each other take 4.8 GB and 13 s in PDFium, and nothing stops a call of it. So it
runs where it can be ended. What comes back is numbers and pixels, which no file can make into anything else.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import struct
import subprocess
import sys
import threading
from typing import IO, Any

from ...errors import RequestError

COUNT = -1  # in place of a page
MEMORY_BYTES = 2 * 2**30
_WALL_SECONDS = 300  # also where a system has no limit on processor time
_CLOSE_SECONDS = 5
# A page or COUNT, most pixels, pixels of a point, seconds; bytes of a file, 0 for the one before.
_CALL = struct.Struct("<qQddQ")
# What follows, its length, two numbers of it, and seconds of processor time.
_ANSWER = struct.Struct("<BQQQd")
_NUMBER, _PIXELS, _LARGE, _ERROR = range(4)


class TooLargeError(Exception):
    """A page has more pixels than allowed.

    Args:
        width: its pixels.
        height: the same.
    """

    def __init__(self, width: int, height: int) -> None:
        super().__init__(width, height)
        self.width, self.height = width, height


class PdfProcess:
    """The parent's end; thread-safe. The child starts with the first call, and again after it was ended.

    Args:
        memory: most bytes of the child's address space, where the system limits it.
    """

    def __init__(self, memory: int = MEMORY_BYTES) -> None:
        self._memory = memory
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._held: bytes | None = None  # the file that the child has open
        self._lock = threading.Lock()

    def count(self, data: bytes, seconds: float) -> tuple[int, float]:
        """Return the number of pages of a file, and the seconds of processor time that it took; see ``draw``.

        Raises:
            RequestError: as ``draw``.
        """
        _, (count, _), spent = self._call(data, COUNT, 0, 0.0, seconds)
        return count, spent

    def draw(
        self, data: bytes, page: int, *, scale: float, most_pixels: int, seconds: float
    ) -> tuple[bytes, int, int, float]:
        """Return a page as bytes of RGB, row by row, with its width and height, and the seconds that it took.

        Args:
            data: the content of the file.
            page: counted from 0.
            scale: pixels of a point.
            most_pixels: of the page.
            seconds: most seconds of processor time, where the system limits it.

        Raises:
            TooLargeError: the page has more pixels.
            RequestError: the file is damaged or encrypted, or needs more time or memory.
        """
        content, (width, height), spent = self._call(data, page, most_pixels, scale, seconds)
        return content, width, height, spent

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    def _call(
        self, data: bytes, page: int, most_pixels: int, scale: float, seconds: float
    ) -> tuple[bytes, tuple[int, int], float]:
        with self._lock:
            calls, answers = self._pipes()
            known = self._held is data
            child = self._child
            assert child is not None  # noqa: S101 -- it has pipes
            timer = threading.Timer(_WALL_SECONDS, child.kill)
            timer.daemon = True
            timer.start()
            try:
                calls.write(
                    _CALL.pack(page, most_pixels, scale, max(seconds, 0.0), 0 if known else len(data))
                )
                if not known:
                    calls.write(data)
                calls.flush()
                self._held = data
                kind, length, first, second, spent = _ANSWER.unpack(_read(answers, _ANSWER.size))
                content = _read(answers, length)
            except (OSError, EOFError) as error:
                raise self._ended(seconds) from error
            finally:
                timer.cancel()
        if kind == _LARGE:
            raise TooLargeError(first, second)
        if kind == _ERROR:
            why = content.decode(errors="replace")
            raise RequestError(f"a PDF file cannot be read: {why}; it may be damaged or encrypted")
        return content, (first, second), spent

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Return the child's pipes; start it if there is none, or if it is that of a process that forked."""
        if self._child is None or self._owner != os.getpid() or self._child.poll() is not None:
            self._end()
            command = [sys.executable, "-m", __name__, str(self._memory)]
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            self._owner = os.getpid()
        assert self._child.stdin is not None  # noqa: S101 -- both are pipes
        assert self._child.stdout is not None  # noqa: S101
        return self._child.stdin, self._child.stdout

    def _ended(self, seconds: float) -> RequestError:
        """Return why the child has ended."""
        child = self._child
        code = None
        if child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(_CLOSE_SECONDS)
        self._end()
        if code in (-getattr(signal, "SIGXCPU", 0), -getattr(signal, "SIGKILL", 0)):
            what = f"more than {seconds:.0f} s of processor time"
        else:
            what = f"more than {self._memory >> 20} MiB of memory, or makes PDFium fail ({code})"
        return RequestError(f"a PDF file needs {what}; send its pages as pictures")

    def _end(self) -> None:
        child, self._child, self._held = self._child, None, None
        if child is None:
            return
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._owner != os.getpid():
            child.returncode = 0  # another process waits for it
            return
        child.kill()
        child.wait()


PROCESS = PdfProcess()
atexit.register(PROCESS.close)


def _read(pipe: IO[bytes], count: int) -> bytes:
    """Read all of ``count`` bytes.

    Raises:
        EOFError: the child has ended.
    """
    content = pipe.read(count)
    if len(content) < count:
        raise EOFError
    return content


def _serve(calls: IO[bytes], answers: IO[bytes]) -> None:
    """Answer calls until the parent ends."""
    import pypdfium2

    document = None
    while head := calls.read(_CALL.size):
        page, most_pixels, scale, seconds, length = _CALL.unpack(head)
        begin = os.times()
        _limit_time(begin.user + begin.system + seconds)
        kind, content, numbers = _NUMBER, b"", (0, 0)
        try:
            if length:
                document = None
                document = pypdfium2.PdfDocument(_read(calls, length))
            if document is None:
                raise pypdfium2.PdfiumError("the file was not opened")
            if page == COUNT:
                numbers = (len(document), 0)
            else:
                kind, content, numbers = _drawn(document[page], most_pixels, scale)
        except pypdfium2.PdfiumError as error:
            kind, content = _ERROR, str(error).encode()
        end = os.times()
        spent = end.user + end.system - begin.user - begin.system
        answers.write(_ANSWER.pack(kind, len(content), *numbers, spent))
        answers.write(content)
        answers.flush()


def _drawn(page: Any, most_pixels: int, scale: float) -> tuple[int, bytes, tuple[int, int]]:
    import pypdfium2.raw

    width, height = (math.ceil(size * scale) for size in page.get_size())
    if width * height > most_pixels:
        return _LARGE, b"", (width, height)
    rgb = int(pypdfium2.raw.FPDFBitmap_BGR)  # bytes in reverse
    drawn = page.render(scale=scale, rev_byteorder=True, force_bitmap_format=rgb)
    rows = memoryview(drawn.buffer).cast("B")
    lines = (rows[row * drawn.stride : row * drawn.stride + 3 * drawn.width] for row in range(drawn.height))
    return _PIXELS, b"".join(lines), (drawn.width, drawn.height)


def _limit_time(seconds: float) -> None:
    """Let the system end this process when it has used so many seconds, in whole ones."""
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds) + 1, resource.RLIM_INFINITY))


def _limit_memory(count: int) -> None:
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (count, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _limit_memory(int(sys.argv[1]))
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt, EOFError):
        _serve(sys.stdin.buffer, sys.stdout.buffer)
