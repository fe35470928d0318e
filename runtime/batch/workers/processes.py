"""Workers in separate processes on this machine."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

from ....errors import CarryallError, ProviderRuntimeError, UsageError
from ..inputs.lines import BatchLine
from ..jobs.journal import LineResult
from .pool import PIECE_LINES, POLL_SECONDS, Give, Take, WorkerLost
from .worker import WorkerSpec, open_worker

_ANSWERS_SECONDS = 0.05
_NAME = "carryall-batch-worker"  # of every worker process


class ProcessWorker:
    """A spawned worker process, which requests lines over a pipe when it needs them.

    Args:
        spec: the specification of the worker.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.name = spec.worker or ""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(spec, theirs), name=_NAME, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        """The id of the process."""
        return self._process.pid

    def exchange(self, give: Give, take: Take, over: threading.Event) -> None:
        """See ``Worker``.

        Raises:
            UsageError: the process ended while it imported the main script.
        """
        began = False
        try:
            wanted = 0
            while not over.is_set():
                if wanted:
                    lines = give(wanted)
                    self._pipe.send(lines)
                    wanted = 0
                if not self._pipe.poll(POLL_SECONDS):
                    continue
                kind, value = self._pipe.recv()
                began = True
                if kind == "want":
                    wanted = value
                elif kind == "answers":
                    take(value)
                elif kind == "error":
                    raise value
                elif kind == "end":
                    return
        except (EOFError, OSError) as error:
            self._process.join(POLL_SECONDS)
            code = self._process.exitcode
            if not began:
                raise UsageError(
                    f"worker {self.name} ended with exit code {code} before it began: it imports the main"
                    " script, which must start batches below 'if __name__ == \"__main__\":'"
                ) from None
            raise WorkerLost(f"worker {self.name} ended with exit code {code}") from error

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def end_if_worker() -> None:
    """End this process if it is a worker's: its main script starts a batch when it is imported.

    The process that started the worker raises the error; see ``ProcessWorker.exchange``.
    """
    if multiprocessing.current_process().name == _NAME:
        raise SystemExit(1)


def _serve(spec: WorkerSpec, pipe: Connection) -> None:
    """Answer lines until there are no more. Runs in the worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    over = threading.Event()
    answers: queue.SimpleQueue[LineResult | None] = queue.SimpleQueue()
    turn = threading.Lock()
    sender = threading.Thread(target=_send_answers, args=(pipe, answers, turn), daemon=True)
    try:
        pipe.send(("began", None))
        engine = open_worker(spec)
        sender.start()
        for answer in engine.run(_asked_for(pipe, turn), over):
            answers.put(answer)
        answers.put(None)
        sender.join()
        engine.close()
        with turn:
            pipe.send(("end", None))
    except CarryallError as error:
        with turn:
            pipe.send(("error", _portable(error)))
    except (EOFError, BrokenPipeError):
        pass  # the main process is gone, so the answers are not needed


def _portable(error: CarryallError) -> CarryallError:
    """Return an error that pickle can restore: errors with other arguments than a message are replaced."""
    return error if type(error).__init__ is Exception.__init__ else ProviderRuntimeError(str(error))


def _asked_for(pipe: Connection, turn: threading.Lock) -> Iterator[BatchLine | None]:
    """Yield lines, requested from the main process when they are needed."""
    while True:
        with turn:
            pipe.send(("want", PIECE_LINES))
        lines: Sequence[BatchLine] | None = pipe.recv()
        if lines is None:
            yield None
            time.sleep(POLL_SECONDS)
        elif lines:
            yield from lines
        else:
            return


def _send_answers(
    pipe: Connection, answers: queue.SimpleQueue[LineResult | None], turn: threading.Lock
) -> None:
    """Send the queued answers to the main process, several at once, until a None."""
    more = True
    while more:
        piece = []
        try:
            while (answer := answers.get(timeout=_ANSWERS_SECONDS)) is not None:
                piece.append(answer)
                if len(piece) >= PIECE_LINES:
                    break
            more = answer is not None
        except queue.Empty:
            pass
        if piece:
            with turn:
                pipe.send(("answers", piece))
