"""The steps of ``carryall demo``: export, quantize and optimize the embedded model."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ..exporter.package import Package
from ..graph_opt.graph import graph_facts
from ..progress import Progress
from ..records import dataclass
from ..runtime.tasks.export import export
from ..runtime.tasks.optimize import optimize
from ..runtime.tasks.quantize import quantize
from .progress import progress


@dataclass(frozen=True, slots=True)
class DemoStep:
    """The result of one step."""

    name: str
    result: str
    package: Path
    operators: dict[str, int]
    weight_bytes: int
    seconds: float

    @property
    def nodes(self) -> int:
        """The number of nodes of the graph."""
        return sum(self.operators.values())


def run_steps(folder: Path, *, quiet: bool) -> list[DemoStep]:
    """Run all steps on the embedded model; each writes a package into ``folder``."""
    portable, small, lowered = (folder / name for name in ("portable", "int4", "cpu"))
    return [
        _step("export", "portable ONNX", portable, _export, quiet),
        _step(
            "quantize", "int4, int8 embedding", small, lambda out, tell: _quantize(portable, out, tell), quiet
        ),
        _step(
            "optimize", "kernels of the CPU", lowered, lambda out, tell: _optimize(small, out, tell), quiet
        ),
    ]


def _step(name: str, result: str, out: Path, work: Callable[[Path, Progress], None], quiet: bool) -> DemoStep:
    start = time.perf_counter()
    with progress(name, quiet=quiet) as tell:
        work(out, tell)
    seconds = time.perf_counter() - start
    model = Package.open(out).load()
    weight_bytes = sum(tensor.nbytes for tensor in graph_facts.initializers(model))
    return DemoStep(name, result, out, graph_facts.operators(model), weight_bytes, seconds)


def _export(out: Path, tell: Progress) -> None:
    export("demo", out, progress=tell)


def _quantize(source: Path, out: Path, tell: Progress) -> None:
    quantize(source, out, "int4-fast", progress=tell)


def _optimize(source: Path, out: Path, tell: Progress) -> None:
    optimize(source, out, target="cpu", progress=tell)
