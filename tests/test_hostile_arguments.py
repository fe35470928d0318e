"""Every public function and class with arguments of wrong types and impossible values: an error of ours.

The names come from ``carryall.__all__``, so a new one fails here until it has a row.
"""

from __future__ import annotations

import inspect
import math
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import write_tiny

import carryall
from carryall import batch
from carryall.errors import CarryallError

SECONDS = 5.0  # of the processor
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 10**30, 0.5, math.nan, math.inf, -math.inf, np.float32("nan"), 1j),
    *("", "abc", "\udcff", "a\0b", "x" * 300, "x" * 5000, b"bytes", b"\xff"),
    *([], [1], [None], {}, {"a": 1}, {1: 2}, object(), range(3), np.array([1.0])),
    *(Path("binary"), Path("folder"), Path("empty"), Path("missing/a"), lambda: None),
)
FUNCTIONS: Mapping[str, dict[str, Any]] = {
    "export": {"source": "checkpoint", "out": "out"},
    "optimize": {"model": "package", "out": "out"},
    "quantize": {"model": "package", "out": "out"},
    "quantize_any": {"source": "package/model.onnx", "out": "out.onnx"},
    "verify": {"reference": "package", "candidate": "package", "steps": 2},
    "diff": {"a": "package", "b": "package"},
    "detect": {"model": "package", "text": "def f(x): return x"},
    "Watermark": {},
    "evaluate": {"model": "package", "text": "def f(x): return x" * 5},
    "benchmark": {"model": "missing/model"},
    "plan": {"model": "package", "bandwidth": 1e9},
    "LLM": {"model": "package"},
    "TextClassifier": {"folder": "package"},
    "TextEncoder": {"folder": "package"},
    "TokenClassifier": {"folder": "package"},
    "AsyncLLM": {"model": "package"},
    "InferenceSession": {"path_or_bytes": "package/model.onnx"},
    "DynamicBatcher": {"session": None},
    "SamplingParams": {},
    "ModelConfig": {"model": "package"},
    "EngineConfig": {},
    "BeamSearchOptions": {},
    "QuantizationRecipe": {},
    "StructuredOutput": {"regex": "a"},
    "batch.run": {"source": "lines.jsonl", "output": "out.jsonl", "model": "package"},
    "batch.map_table": {"table": None, "template": "{{ text }}", "model": "package"},
    "batch.merge": {"jobs": ["missing"], "output": "out.jsonl"},
    "batch.report": {"name": "missing", "path": "out.html"},
    "batch.status": {"name": "missing"},
    "batch.cancel": {"name": "missing"},
    "batch.retry_failed": {"job": "missing"},
    "batch.RayPredictor": {"model": "missing/model"},
    "batch.share_model": {"model": "missing/model"},
}
# What carryall makes and the caller reads; modules, protocols and constants.
MADE_BY_US = {
    *("BenchmarkReport", "DiffReport", "EvaluationReport", "ExportReport", "OptimizeReport"),
    "PlanReport",
    "DetectionReport",
    *("QuantizeReport", "VerificationReport", "CompletionOutput", "RequestOutput", "batch.BatchJob"),
    "batch.SharedModel",
    *("CarryallError", "QuantizationWarning", "Progress", "__version__", "batch"),
}
INNER = {"batch.BatchSpec"}  # of ``batch.run``, which makes it


def public(name: str) -> Callable[..., Any]:
    module, _, own = name.rpartition(".")
    found: Callable[..., Any] = getattr(batch if module else carryall, own)
    return found


def test_every_public_name_has_a_row() -> None:
    known = {*carryall.__all__, *(f"batch.{name}" for name in batch.__all__)}
    assert known == set(FUNCTIONS) | MADE_BY_US | INNER


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("sandbox")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("CARRYALL_CACHE", str(tmp_path_factory.mktemp("cache")))
        write_tiny("llama", folder / "checkpoint")
        carryall.export("checkpoint", "package")
        (folder / "lines.jsonl").write_text('{"prompt": "def f(", "max_tokens": 2}\n')
        (folder / "empty").touch()
        (folder / "binary").write_bytes(bytes(range(256)) * 20)
        (folder / "folder").mkdir()
        yield folder


def end(made: Any) -> None:
    """Close what was opened."""
    if isinstance(made, batch.BatchJob):
        try:
            made.wait(60)
        finally:
            made.close()
    for name in ("shutdown", "close"):
        if hasattr(made, name) and not isinstance(made, batch.BatchJob):
            getattr(made, name)()
            return


def check(name: str, parameter: str, value: Any, sandbox: Path) -> None:
    before, threads = set(sandbox.rglob("*")), threading.active_count()
    start = time.process_time()
    succeeded = False
    try:
        end(public(name)(**{**FUNCTIONS[name], parameter: value}))
        succeeded = True
    except CarryallError:
        pass
    assert time.process_time() - start < SECONDS, (name, parameter, value)
    made = sorted(set(sandbox.rglob("*")) - before)
    assert succeeded or not made, (name, parameter, value, made)
    for path in reversed(made):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if name != "batch.share_model":  # starts a cluster of this machine where Ray is installed
        assert threading.active_count() <= threads, (name, parameter, value)


def parameters(name: str) -> list[str]:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    # What is called is the caller's own code, which may raise what it likes.
    called = {"open_executor", "progress"}
    if name == "quantize":
        called.add("report")  # what it tells is measured for seconds; ``optimize`` tries the names
    found = inspect.signature(public(name)).parameters.values()
    return [one.name for one in found if one.kind not in variadic and one.name not in called]


@pytest.mark.long
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_few_values_of_every_parameter(name: str, sandbox: Path) -> None:
    for parameter in parameters(name):
        for value in random.Random(f"{name} {parameter}").sample(VALUES, 6):
            check(name, parameter, value, sandbox)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_values_of_every_parameter(name: str, sandbox: Path) -> None:
    for parameter in parameters(name):
        for value in VALUES:
            check(name, parameter, value, sandbox)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_progress_that_cannot_be_called_is_refused(name: str, sandbox: Path) -> None:
    if "progress" not in inspect.signature(public(name)).parameters:
        pytest.skip("it takes none")
    check(name, "progress", 5, sandbox)
