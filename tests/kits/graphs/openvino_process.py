"""OpenVINO in a process of its own: some graphs end it, also such that onnxruntime runs."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Arrays = list[npt.NDArray[Any]]
Feed = dict[str, npt.NDArray[Any]]


class OpenVinoProcess:
    """Runs graphs; a process that has ended is started again.

    Attributes:
        crashes: how many graphs ended it.
    """

    def __init__(self) -> None:
        self.crashes = 0
        self._pool = _pool()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._pool.shutdown()

    def results(self, model: bytes | Path, feed: Feed) -> Arrays | None:
        """Return the results of a graph, or of a file; None if OpenVINO refuses it, or ends."""
        try:
            return self._pool.submit(_results, model, feed).result()
        except BrokenProcessPool:
            self.crashes += 1
            self._pool.shutdown()
            self._pool = _pool()
            return None


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _results(model: bytes | Path, feed: Feed) -> Arrays | None:
    import openvino as ov

    try:
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": "1"}
        core = ov.Core()
        compiled = core.compile_model(core.read_model(model), "CPU", settings)
        names = [port.get_any_name() for port in compiled.inputs]
        found = compiled({name: feed[name] for name in names})
        return [np.array(found[index]) for index in range(len(compiled.outputs))]
    except Exception:  # noqa: BLE001 -- whatever its frontend raises
        return None
