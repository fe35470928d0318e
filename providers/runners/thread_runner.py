"""A runner in a thread of its own: the only thread that opens it, runs it and frees it.

ONNX Runtime keeps captured runs, handles of cuBLAS and graphs of cuDNN for each thread
(``CUDAExecutionProvider::PerThreadContext``). A step of another thread would capture its run again, at a time
when nobody expects it, and keep both. Callers change threads: who waits for an ``LLM`` runs its next step.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ProviderRuntimeError
from ..base import BestLogits, LoraMatrices, Pending, Row, Runner
from .remote_runner import RemoteRunner

_Results = list[npt.NDArray[np.float32] | BestLogits]


class ThreadRunner(RemoteRunner):
    """A ``Runner`` that hands every call to one thread, in order.

    Args:
        open_runner: opens the runner, in the thread.

    Raises:
        CarryallError: ``open_runner`` raised it.
    """

    def __init__(self, open_runner: Callable[[], Runner]) -> None:
        self._calls = _Calls()
        self._thread = threading.Thread(target=_work, args=(self._calls,), name="device", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._calls.put, None)  # a runner may be dropped without ``close``
        try:
            self.runner: Runner | None = self._call(open_runner)
        except BaseException:
            self._end()
            raise
        self.info = self._opened().info

    def forward(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]:
        """Run one step; see ``Runner``."""
        results: list[npt.NDArray[np.float32]] = self._call(self._opened().forward, rows)
        return results

    def forward_best(self, rows: Sequence[Row]) -> _Results:
        """Run one step; see ``Runner``."""
        return self._threaded(self._call(self._opened().forward_best, rows))

    def submit(self, rows: Sequence[Row]) -> Pending[_Results]:
        """Begin one step; see ``Runner``. The thread begins it while the caller goes on."""
        begun = self._post(self._opened().submit, rows)
        return Pending(lambda: self._threaded(self._call(begun.result().wait)))

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV cache now, in bytes."""
        return 0 if self.runner is None else self.runner.kv_bytes

    def load_lora(self, place: int, matrices: LoraMatrices) -> None:
        self._ask("load_lora", place, matrices)

    def close(self) -> None:
        """Free all resources and end the thread. The runner cannot be used afterwards."""
        if self.runner is None:
            return
        try:
            self._call(self.runner.close)
        finally:
            self.runner = None
            self._end()
            self._thread.join()

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._call(getattr(self._opened(), method), *arguments)

    def _opened(self) -> Runner:
        if self.runner is None:
            raise ProviderRuntimeError("the runner is closed")
        return self.runner

    def _threaded(self, results: _Results) -> _Results:
        """Let the thread also download what stayed on the device."""
        return [
            dataclasses.replace(result, whole=partial(self._call, result.whole))
            if isinstance(result, BestLogits)
            else result
            for result in results
        ]

    def _post(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        outcome: Future[Any] = Future()
        self._calls.put((outcome, partial(function, *arguments)))
        return outcome

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if threading.current_thread() is self._thread:  # garbage is collected in any thread
            return function(*arguments)
        return self._post(function, *arguments).result()


_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


def _work(calls: _Calls) -> None:
    """Carry out calls until None. The thread keeps no result, so that it frees nothing of a later caller."""
    while (call := calls.get()) is not None:
        outcome, function = call
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001 -- raised again where the result is awaited
            outcome.set_exception(error)
        del call, outcome, function
