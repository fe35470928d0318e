"""The embedded model's way from its checkpoint to a graph for the CPU, and what each step made."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..exporter.demo import demo_path
from ..exporter.export import export_package
from ..exporter.package import Package, Progress
from ..graph_opt.graph import graph_facts
from ..graph_opt.pipeline.pipeline import run
from ..graph_opt.quantize.methods import quantization
from ..providers import get_provider
from ..providers.base import RunnerConfig
from .progress import progress
from .write_graph import write_graph


@dataclass(frozen=True, slots=True)
class Step:
    """One step, and the graph that it made."""

    name: str
    result: str
    package: Path
    operators: dict[str, int]
    weight_bytes: int
    seconds: float

    @property
    def nodes(self) -> int:
        """Nodes of the graph."""
        return sum(self.operators.values())


def travel(folder: Path, *, quiet: bool) -> list[Step]:
    """Take the embedded model through all steps; each writes a package into ``folder``."""
    portable, small, lowered = (folder / name for name in ("portable", "int4", "cpu"))
    return [
        _step("export", "portable ONNX", portable, _export, quiet),
        _step(
            "quantize", "int4, blocks of 128", small, lambda out, tell: _quantize(portable, out, tell), quiet
        ),
        _step(
            "optimize", "kernels of the CPU", lowered, lambda out, tell: _optimize(small, out, tell), quiet
        ),
    ]


def _step(name: str, result: str, out: Path, work: Callable[[Path, Progress], None], quiet: bool) -> Step:
    start = time.perf_counter()
    with progress(name, quiet=quiet) as tell:
        work(out, tell)
    seconds = time.perf_counter() - start
    model = Package.open(out).load()
    weight_bytes = sum(tensor.nbytes for tensor in graph_facts.initializers(model))
    return Step(name, result, out, graph_facts.operators(model), weight_bytes, seconds)


def _export(out: Path, tell: Progress) -> None:
    export_package(demo_path(), out, progress=tell)


def _quantize(source: Path, out: Path, tell: Progress) -> None:
    method = quantization("int4")
    quantizer = method.quantizer()
    model, _ = run(Package.open(source).load(), [quantizer])
    write_graph(model, source, out, passes=(quantizer.name,), quantization=method.record(), progress=tell)


def _optimize(source: Path, out: Path, tell: Progress) -> None:
    package = Package.open(source)
    context = RunnerConfig(context_length=package.record.default_context_length)
    model, report = run(package.load(), get_provider("cpu").passes(context))
    write_graph(model, source, out, passes=tuple(one.name for one in report.passes), progress=tell)
