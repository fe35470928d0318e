"""Measure the time of optimizing over the number of layers: a table and a chart.

    python benchmarks/decoders/optimize_cost.py FOLDER [--rounds 3] [--chart FILE.svg]

FOLDER holds <layers>/model.onnx, the same decoder traced with that many layers. Measured is the processor
time of the portable passes and of the CPU passes; reading and writing files is not included.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from pathlib import Path

import onnx_ir as ir
from charts import lines
from optimizers import CONTEXT

from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import portable_passes


def seconds(path: Path) -> tuple[float, float]:
    """Return processor seconds of the portable passes and of the CPU passes."""
    model = ir.load(path)
    start = time.process_time()
    model, _ = run(model, portable_passes())
    middle = time.process_time()
    run(model, slot_passes(SlotOptions(context_length=CONTEXT)))
    return middle - start, time.process_time() - middle


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chart", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    found: dict[str, list[tuple[float, float]]] = {"portable": [], "CPU": []}
    print("| layers | portable s | CPU s | both, ms a layer |\n| ---: | ---: | ---: | ---: |")
    for folder in sorted(arguments.folder.iterdir(), key=lambda path: int(path.name)):
        rounds = [seconds(folder / "model.onnx") for _ in range(arguments.rounds)]
        layers = int(folder.name)
        medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
        for name, value in zip(found, medians, strict=True):
            found[name].append((layers, value))
        print(
            f"| {layers} | {medians[0]:.2f} | {medians[1]:.2f} | {1e3 * sum(medians) / layers:.1f} |",
            flush=True,
        )
    if arguments.chart:
        arguments.chart.write_text(
            lines("Processor seconds to optimize a traced decoder", found, x="layers", y="seconds")
        )


if __name__ == "__main__":
    main()
