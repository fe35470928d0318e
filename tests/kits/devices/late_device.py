"""CUDA with paged KV on a device that is really asynchronous: the CPU, whose work a thread does late.

Copies read and write memory when the thread comes to them, so that memory which is used again too early gives
wrong tokens. A failed run makes all later waits fail until it was reported once, as a failed kernel does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from device_stand_ins import HostStream, PagedCudaOnCpu

from carryall.errors import ProviderUnavailableError


class LateStream(HostStream):
    """Does the work of a stream in a thread, each piece after a random time of up to ``seconds``."""

    def __init__(self, seed: int = 0, seconds: float = 0.0) -> None:
        self._random, self._seconds = np.random.default_rng(seed), seconds
        self._work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.fault: BaseException | None = None
        self.most = 0  # pieces of work that waited at a time
        self._thread = threading.Thread(target=self._do, daemon=True)
        self._thread.start()

    def give(self, work: Callable[[], Any]) -> None:
        """Do something after all former work."""
        self._work.put(work)
        self.most = max(self.most, self._work.qsize())

    def copy(self, target: int, source: int, size: int) -> None:
        self.give(lambda: HostStream.copy(self, target, source, size))

    def mark(self) -> Callable[[], None]:
        reached = threading.Event()
        self.give(reached.set)

        def wait() -> None:
            assert reached.wait(60)
            fault, self.fault = self.fault, None
            if fault is not None:
                raise ProviderUnavailableError(f"cudaEventSynchronize failed: {fault}") from fault

        return wait

    def end(self) -> None:
        """End the thread after all work."""
        self._work.put(None)
        self._thread.join()

    def _do(self) -> None:
        while (work := self._work.get()) is not None:
            time.sleep(float(self._random.random()) * self._seconds)
            try:
                work()
            except Exception as error:  # noqa: BLE001 -- whoever waits gets it
                self.fault = self.fault or error


class LateSession:
    """Gives the runs of captured forms to a stream; other runs return when they are done."""

    def __init__(self, session: Any, stream: LateStream) -> None:
        self._session, self._stream = session, stream
        self.faulty: Callable[[int], bool] = lambda count: False
        self.runs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        number, self.runs = self.runs, self.runs + 1

        def run() -> None:
            if self.faulty(number):
                raise RuntimeError("CUDA error 719: launch failure")
            self._session.run_with_iobinding(binding, options)

        self._stream.give(run)
        if options.get_run_config_entry("gpu_graph_id") == "-1":
            self._stream.mark()()


class LateCudaOnCpu(PagedCudaOnCpu):
    """The provider; ``streams`` and ``sessions`` are those of its runners in order."""

    name = "late-cuda-on-cpu"

    def __init__(self, seed: int = 0, seconds: float = 0.0) -> None:
        self._seed, self._seconds = seed, seconds
        self.streams: list[LateStream] = []
        self.sessions: list[LateSession] = []

    def stream(self, index: int) -> HostStream:
        if len(self.streams) > len(self.sessions):
            return HostStream()  # the second of a runner only reads what is done
        self.streams.append(LateStream(self._seed, self._seconds))
        return self.streams[-1]

    def _open(self, *arguments: Any, **named: Any) -> Any:
        self.sessions.append(LateSession(super()._open(*arguments, **named), self.streams[-1]))
        return self.sessions[-1]
