"""Optimizer league: what each optimizer makes of decoder traces, as one table and one chart.

    python benchmarks/league.py TRACES [--exporter optimum] [--family llama] [--optimizer carryall]
        [--latency] [--json FILE] [--markdown FILE] [--chart FILE.svg] [--speed-chart FILE.svg]
    python benchmarks/league.py --join FILE.json ... [--markdown FILE] [--chart FILE.svg] ...

TRACES holds <exporter>/<family>/**/*.onnx. A row says how many nodes are left (constants not counted), which
fused operators there are, whether sixteen greedy tokens of two prompts equal the original's, the seconds it
took, and with --latency the time of one decode step on 256 cached tokens: processor time on one thread, the
optimizers of one trace interleaved in 60 rounds, sessions opened anew every 15, and the ratio to that of
--reference in the same round, its median and quartiles. Optimizers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from charts import bars
from decoder_run import Decoder, head_size, steps_ms
from optimizers import OPTIMIZERS

_ATTENTION = ("Attention", "GroupQueryAttention", "MultiHeadAttention")
_NORM = (
    "RMSNormalization",
    "LayerNormalization",
    "SimplifiedLayerNormalization",
    "SkipSimplifiedLayerNormalization",
    "SkipLayerNormalization",
    "BranchwiseRMSNorm",
)
_PROMPTS = ([5, 17, 99, 23, 42, 7, 300], [1000, 3, 77])
_TOKENS = 16
_PAST = 256


@dataclass(frozen=True, slots=True)
class Row:
    """One optimizer on one trace."""

    exporter: str
    trace: str
    optimizer: str
    nodes: int = 0
    layers: int = 0
    attention: int = 0
    norms: int = 0
    rotary: int = 0
    tokens_equal: bool | None = None
    error: float | None = None
    seconds: float = 0.0
    step_ms: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    failure: str = ""


def count(model: Path) -> Counter[str]:
    """Count the operators of a model, constants left out."""
    nodes = onnx.load(model, load_external_data=False).graph.node
    return Counter(node.op_type for node in nodes if node.op_type != "Constant")


def compete(
    exporter: str, trace: str, source: Path, optimizers: list[str], reference: str | None
) -> Iterator[Row]:
    """Run optimizers on one trace; with a ``reference`` their steps are timed in turn, when all are done."""
    with tempfile.TemporaryDirectory() as folder:
        targets = {name: Path(folder, name, "model.onnx") for name in optimizers}
        rows = []
        for name, target in targets.items():
            target.parent.mkdir()
            rows.append(measure(exporter, trace, source, target, name))
            if reference is None:
                yield rows[-1]
        if reference is not None:
            running = {row.optimizer: targets[row.optimizer] for row in rows if not row.failure}
            times = steps_ms(running, head_size(source), _PAST)
            yield from (timed(row, times, reference) for row in rows)


def timed(row: Row, times: dict[str, list[float]], reference: str) -> Row:
    """Return a row with its median time, and the median and quartiles of its ratios to the reference's."""
    own, others = times.get(row.optimizer), times.get(reference)
    if own is None:
        return row
    if others is None:
        return replace(row, step_ms=statistics.median(own))
    low, middle, high = statistics.quantiles([a / b for a, b in zip(own, others, strict=True)], n=4)
    return replace(row, step_ms=statistics.median(own), ratio=middle, ratio_low=low, ratio_high=high)


def measure(exporter: str, trace: str, source: Path, target: Path, optimizer: str) -> Row:
    """Run one optimizer on one trace, and compare what both graphs generate."""
    start = time.perf_counter()
    try:
        OPTIMIZERS[optimizer][1](source, target)
        seconds = time.perf_counter() - start
        size = head_size(source)
        before, after = Decoder(source, size), Decoder(target, size)
        runs = [(before.generate(p, _TOKENS), after.generate(p, _TOKENS)) for p in _PROMPTS]
    except Exception as failure:  # noqa: BLE001 -- other optimizers fail in any way; the table says so
        text = f"{type(failure).__name__}: {failure}".splitlines()[0][:90]
        return Row(exporter, trace, optimizer, seconds=time.perf_counter() - start, failure=text)
    found = count(target)
    attention, norms = (sum(found[name] for name in names) for names in (_ATTENTION, _NORM))
    return Row(
        exporter,
        trace,
        optimizer,
        found.total(),
        len(before.caches) // 2,
        attention,
        norms,
        found["RotaryEmbedding"],
        all(left[0] == right[0] for left, right in runs),
        max(float(np.abs(left[1] - right[1]).max()) for left, right in runs),
        seconds,
    )


def traces(root: Path, exporters: list[str], families: list[str]) -> Iterator[tuple[str, str, Path]]:
    """Yield exporter, name and file of every chosen trace."""
    for path in sorted(root.glob("*/*/**/*.onnx")):
        exporter, family, *_ = path.relative_to(root).parts
        if (not exporters or exporter in exporters) and (not families or family in families):
            yield exporter, str(path.relative_to(root / exporter).with_suffix("")), path


def show(row: Row) -> str:
    """Return a row as text."""
    name = f"{row.exporter + '/' + row.trace:34} {row.optimizer:17}"
    if row.failure:
        return f"{name} {row.failure}"
    tokens = "equal" if row.tokens_equal else f"WRONG by {row.error:.1e}"
    step = "" if row.step_ms is None else f"{row.step_ms:8.3f} ms"
    if row.ratio is not None:
        step += f"{row.ratio:7.3f} [{row.ratio_low:.3f}, {row.ratio_high:.3f}]"
    fused = f"{row.attention:3} of {row.layers}"
    return (
        f"{name} {row.nodes:6} {fused:>8} {row.norms:6} {row.rotary:7} {row.seconds:8.2f}  {tokens:16}{step}"
    )


def summary(rows: list[Row]) -> str:
    """Return one Markdown line for each exporter and optimizer, medians over the traces."""
    steps = any(row.step_ms is not None for row in rows)
    columns = ["exporter", "optimizer", "nodes left", "attention fused", "tokens equal", "seconds"]
    columns += ["decode step ms", "of the reference's (least, most)", "faster"] if steps else []
    made = ["| " + " | ".join(columns) + " |", "| --- | --- |" + " ---: |" * (len(columns) - 2)]
    for exporter, optimizer, chosen in _grouped(rows):
        done = [row for row in chosen if not row.failure]
        if not done:
            reason = chosen[0].failure
            made.append(f"| {exporter} | {optimizer} | failed: {reason} |" + " |" * (len(columns) - 3))
            continue
        cells = [
            f"{statistics.median(row.nodes for row in done):g}",
            f"{sum(row.attention for row in done)} of {sum(row.layers for row in done)}",
            f"{sum(bool(row.tokens_equal) for row in done)} of {len(chosen)}",
            f"{statistics.median(row.seconds for row in done):.2f}",
        ]
        cells += _step_cells(done) if steps else []
        made.append(f"| {exporter} | {optimizer} | " + " | ".join(cells) + " |")
    return "\n".join(made) + "\n"


def _step_cells(rows: list[Row]) -> list[str]:
    """Return the median step, its ratio to the reference's with its range, and how often it is below 1.

    That is where three quarters of the rounds say so.
    """
    times = [row.step_ms for row in rows if row.step_ms is not None]
    ratios = [row.ratio for row in rows if row.ratio is not None]
    if not times or not ratios:
        return ["", "", ""]
    faster = sum(row.ratio_high is not None and row.ratio_high < 1 for row in rows)
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})"
    return [f"{statistics.median(times):.2f}", spread, str(faster)]


def chart(rows: list[Row]) -> str:
    """Return the nodes left by each optimizer, and how many attentions it fused."""
    groups: dict[str, dict[str, float]] = {}
    notes: dict[str, str] = {}
    for exporter, optimizer, chosen in _grouped(rows):
        done = [row for row in chosen if not row.failure]
        if not done:
            continue
        groups.setdefault(exporter, {})[optimizer] = statistics.median(row.nodes for row in done)
        attention, layers = sum(row.attention for row in done), sum(row.layers for row in done)
        equal = sum(bool(row.tokens_equal) for row in done)
        notes[f"{exporter}/{optimizer}"] = f"(attention {attention}/{layers}, equal {equal}/{len(chosen)})"
    return bars("Nodes left in two-layer decoders", groups, unit="median over the families", notes=notes)


def speed_chart(rows: list[Row]) -> str:
    """Return the time of a decode step of each optimizer, as a multiple of the reference's."""
    groups: dict[str, dict[str, float]] = {}
    notes: dict[str, str] = {}
    for exporter, optimizer, chosen in _grouped(rows):
        ratios = [row.ratio for row in chosen if row.ratio is not None]
        if ratios:
            groups.setdefault(exporter, {})[optimizer] = round(statistics.median(ratios), 3)
            notes[f"{exporter}/{optimizer}"] = f"({min(ratios):.2f} to {max(ratios):.2f})"
    return bars(
        "Time of a decode step",
        groups,
        unit="multiple of carryall's for the CPU, median of the families, range",
        notes=notes,
    )


def _grouped(rows: list[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    for exporter, optimizer in dict.fromkeys((row.exporter, row.optimizer) for row in rows):
        chosen = [row for row in rows if (row.exporter, row.optimizer) == (exporter, optimizer)]
        yield exporter, optimizer, chosen


def main() -> None:
    """Print the rows, and write what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, nargs="?")
    parser.add_argument("--exporter", nargs="+", default=[])
    parser.add_argument("--family", nargs="+", default=[])
    parser.add_argument("--optimizer", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--reference", default="carryall_cpu", choices=list(OPTIMIZERS))
    parser.add_argument("--join", nargs="+", type=Path, default=[])
    for name in ("json", "markdown", "chart", "speed-chart"):
        parser.add_argument(f"--{name}", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    chosen = [name for name in arguments.optimizer if importlib.util.find_spec(OPTIMIZERS[name][0])]
    for name in sorted(set(arguments.optimizer) - set(chosen)):
        print(f"{name}: {OPTIMIZERS[name][0]} is not installed", file=sys.stderr)
    rows = [Row(**row) for path in arguments.join for row in json.loads(path.read_text())]
    found = traces(arguments.traces, arguments.exporter, arguments.family) if arguments.traces else []
    for exporter, trace, path in found:
        for row in compete(exporter, trace, path, chosen, arguments.reference if arguments.latency else None):
            rows.append(row)
            print(show(row), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(summary(rows))
    if arguments.chart:
        arguments.chart.write_text(chart(rows))
    if arguments.speed_chart:
        arguments.speed_chart.write_text(speed_chart(rows))


if __name__ == "__main__":
    main()
