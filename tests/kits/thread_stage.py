"""A stage of a pipeline in a thread of this process, which can be ended like a process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from carryall.errors import ProviderRuntimeError
from carryall.providers.base import Row, Runner
from carryall.providers.runners.pipeline_runner import PipelineStage

States = list[npt.NDArray[np.float32]]


class ThreadStage(PipelineStage):
    """A runner that computes in a thread, in order.

    Args:
        open_runner: opens the runner, also after the stage was ended.

    Attributes:
        runner: the opened runner.
        restarts: how often it was started again.
        sizes: the rows of each run.
    """

    def __init__(self, open_runner: Callable[[], Runner]) -> None:
        self._open = open_runner
        self._pool = ThreadPoolExecutor(1)
        self._seconds = 0.0
        self._ended = False
        self.restarts = 0
        self.sizes: list[int] = []
        self.runner = open_runner()
        self.info = self.runner.info

    def begin(self, rows: Sequence[Row], states: Future[States] | None) -> Future[States]:
        return self._pool.submit(self._run, [dataclasses.replace(row) for row in rows], states)

    def end(self, begun: Future[States]) -> States:
        return begun.result()

    def alive(self) -> bool:
        return not self._ended

    def restart(self) -> None:
        self.runner = self._open()
        self._ended = False
        self.restarts += 1

    def kill(self) -> None:
        """End the stage, now and for every call until it is started again."""
        self._ended = True

    @property
    def busy_seconds(self) -> float:
        return self._seconds

    @property
    def kv_bytes(self) -> int:
        return self.runner.kv_bytes

    def close(self) -> None:
        self._pool.shutdown()
        self.runner.close()

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._pool.submit(self._call, method, *arguments).result()

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._ended:
            raise ProviderRuntimeError("the stage has ended")
        return getattr(self.runner, method)(*arguments)

    def _run(self, rows: list[Row], states: Future[States] | None) -> States:
        if states is not None:
            taken = states.result()
            rows = [dataclasses.replace(row, hidden_states=own) for row, own in zip(rows, taken, strict=True)]
        begun = time.perf_counter()
        results = [logits.copy() for logits in self._call("forward", rows)]
        self._seconds += time.perf_counter() - begun
        self.sizes.append(len(rows))
        if self._ended:
            raise ProviderRuntimeError("the stage has ended")
        return results
