"""Batch jobs of the toy model, for tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llm_kit import toy_model

from carryall.runtime.batch.execute import Outcome, execute
from carryall.runtime.batch.inputs.lines import BatchLine
from carryall.runtime.batch.jobs.journal import LineResult
from carryall.runtime.batch.spec import BatchSpec
from carryall.runtime.batch.workers.offline import OfflineEngine
from carryall.runtime.batch.workers.worker import WorkerSpec, worker_of

Record = dict[str, Any]
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 4}
NULL = {"provider": "null", "max_slots": 4}


def toy_worker(folder: Path, *, window: int = 16, **model: Any) -> OfflineEngine:
    """Return an in-process worker with the toy model of ``llm_kit``."""
    spec = WorkerSpec(model="toy", sampling=GREEDY, worker="here", window=window)
    return worker_of(toy_model(folder, **model), spec)


def write_lines(path: Path, records: Iterable[Record | str | bytes]) -> Path:
    """Write one line per record; texts and bytes are written unchanged."""
    with path.open("wb") as stream:
        for record in records:
            data = json.dumps(record) if isinstance(record, dict) else record
            stream.write((data if isinstance(data, bytes) else data.encode()) + b"\n")
    return path


def read_lines(path: Path) -> list[Record]:
    """Return the records of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def spec(source: str | Path | Sequence[str | Path], output: str | Path, **options: Any) -> BatchSpec:
    """Return a job with the embedded model's tokenizer on the null provider."""
    inputs = [str(source)] if isinstance(source, str | Path) else list(map(str, source))
    return BatchSpec(
        **{
            "inputs": inputs,
            "output": str(output),
            "model": "demo",
            "loading": NULL,
            "sampling": GREEDY,
            **options,
        }
    )


def run(job: BatchSpec, folder: Path | None = None, **options: Any) -> Outcome:
    """Execute a job with the toy model, which takes no time to load."""
    place = folder or Path(job.output).parent

    def toy(job: BatchSpec, label: str, created: int, progress: object) -> OfflineEngine:
        model = toy_model(place, context_length=1024)
        return worker_of(model, job.worker(label, created))

    return execute(job, **{"open_executor": toy, **options})


class Recorder:
    """Executor that records its lines and calls a function between answers.

    Args:
        inner: the executor that answers the lines.
        after: called with the number of answers before each answer is returned.
    """

    def __init__(self, inner: OfflineEngine, after: Callable[[int], None] = lambda count: None) -> None:
        self.numbers: list[int] = []
        self._inner = inner
        self._after = after

    def run(self, lines: Iterator[BatchLine], stop: threading.Event) -> Iterator[LineResult]:
        """Answer lines."""
        for count, answer in enumerate(self._inner.run(self._noted(lines), stop)):
            self._after(count)
            yield answer

    def _noted(self, lines: Iterator[BatchLine]) -> Iterator[BatchLine]:
        for line in lines:
            self.numbers.append(line.number)
            yield line

    def facts(self) -> dict[str, Any]:
        """Return no facts."""
        return {}

    def close(self) -> None:
        """Free the model."""
        self._inner.close()
