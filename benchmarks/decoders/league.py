"""Compare graph optimizers on decoder traces: a Markdown table and charts.

    python benchmarks/decoders/league.py TRACES [--exporter optimum] [--family llama] [--optimizer carryall]
        [--latency] [--past 256] [--json FILE] [--markdown FILE] [--chart FILE.svg] [--speed-chart FILE.svg]
    python benchmarks/decoders/league.py --join FILE.json ... [--markdown FILE] [--chart FILE.svg] ...

TRACES holds <exporter>/<family>/**/*.onnx. A row has the number of nodes left (without constants), the number
of fused operators, whether sixteen greedy tokens of two prompts equal the original's, and the seconds of
optimizing. With --latency a row also has the time of a decode step on --past cached tokens and its ratio to a
step of --reference. Steps are measured in processor time on one thread, each next to a step of the reference,
in 64 rounds with sessions reopened every four. The ratio has a median, quartiles and the fraction of rounds
that the reference won. "(products)" runs only the products with weights of the reference's graph: a lower
bound of the time. "(again)" is the reference in a second session: the noise of the ratio. Optimizers that are
not installed are skipped. GLIBC_TUNABLES=glibc.malloc.hugetlb=1 reduces the noise that the memory addresses
of weights cause.
"""

from __future__ import annotations

import argparse
import functools
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
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import onnx
from decoder_run import Decoder, head_size, steps_ms
from league_tables import YARDSTICKS, Row, chart, show, speed_chart, summary
from optimizers import CONTEXT, OPTIMIZERS, carryall_cpu, keep_products

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


def count(model: Path) -> Counter[str]:
    """Return the number of nodes of each operator type, without constants."""
    nodes = onnx.load(model, load_external_data=False).graph.node
    return Counter(node.op_type for node in nodes if node.op_type != "Constant")


def compete(
    exporter: str, trace: str, source: Path, optimizers: list[str], reference: str | None, past: int
) -> Iterator[Row]:
    """Run optimizers on one trace; with a ``reference``, time the decode steps of all graphs in turn.

    Args:
        exporter: name of the exporter that wrote the trace.
        trace: name of the trace.
        source: file of the trace.
        optimizers: names of optimizers.
        reference: the optimizer that the others' times are compared with; None measures no times.
        past: number of cached tokens before a timed step.
    """
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
            times: dict[str, list[tuple[float, float]]] = {}
            if reference in running:
                running |= _yardsticks(targets[reference], Path(folder, "products.onnx"))
                rows += [Row(exporter, trace, name) for name in YARDSTICKS]
                times = steps_ms(running, reference, head_size(source), past)
            yield from (timed(row, times) for row in rows)


def _yardsticks(reference: Path, target: Path) -> dict[str, Path]:
    """Return the graph of the weight products, a lower bound of the time, and the reference once more."""
    keep_products(reference, target)
    return dict(zip(YARDSTICKS, (target, reference), strict=True))


def timed(row: Row, times: dict[str, list[tuple[float, float]]]) -> Row:
    """Return a row with its median step time and the quartiles of its ratio to the reference's."""
    if row.optimizer not in times:
        return row
    pairs = times[row.optimizer]
    ratios = [own / other for own, other in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    won = statistics.fmean(ratio > 1 for ratio in ratios)
    step = statistics.median(own for own, _ in pairs)
    return replace(row, step_ms=step, ratio=middle, ratio_low=low, ratio_high=high, won=won)


def measure(exporter: str, trace: str, source: Path, target: Path, optimizer: str) -> Row:
    """Run one optimizer on one trace, and compare the greedy tokens of both graphs."""
    start = time.perf_counter()
    try:
        OPTIMIZERS[optimizer][1](source, target)
        seconds = time.perf_counter() - start
        size = head_size(source)
        before, after = Decoder(source, size), Decoder(target, size)
        runs = [(before.generate(p, _TOKENS), after.generate(p, _TOKENS)) for p in _PROMPTS]
    except Exception as failure:  # noqa: BLE001 -- other optimizers raise any type; the table shows the failure
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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, nargs="?")
    parser.add_argument("--exporter", nargs="+", default=[])
    parser.add_argument("--family", nargs="+", default=[])
    parser.add_argument("--optimizer", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--past", type=int, default=256)
    parser.add_argument("--reference", default="carryall_cpu", choices=list(OPTIMIZERS))
    parser.add_argument("--join", nargs="+", type=Path, default=[])
    for name in ("json", "markdown", "chart", "speed-chart"):
        parser.add_argument(f"--{name}", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    if arguments.past >= CONTEXT:
        OPTIMIZERS["carryall_cpu"] = (
            "carryall",
            functools.partial(carryall_cpu, context=CONTEXT + arguments.past),
        )
    chosen = [name for name in arguments.optimizer if importlib.util.find_spec(OPTIMIZERS[name][0])]
    for name in sorted(set(arguments.optimizer) - set(chosen)):
        print(f"{name}: {OPTIMIZERS[name][0]} is not installed", file=sys.stderr)
    rows = [Row(**row) for path in arguments.join for row in json.loads(path.read_text())]
    reference = arguments.reference if arguments.latency else None
    found = traces(arguments.traces, arguments.exporter, arguments.family) if arguments.traces else []
    for exporter, trace, path in found:
        for row in compete(exporter, trace, path, chosen, reference, arguments.past):
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
