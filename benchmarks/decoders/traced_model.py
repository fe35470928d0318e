"""Optimize a traced decoder of real size: measure the time, and compare its tokens and logits.

    python benchmarks/decoders/traced_model.py TRACE.onnx WORK [--rounds 3] [--prompts 3] [--tokens 32] \\
        [--json FILE]

Loads the trace, runs the portable passes and the CPU passes, measures each, and writes the lowered graph to
WORK. Then both graphs continue the same random prompts greedily, token by token, the original trace in plain
onnxruntime. All logits are compared.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
import warnings
from pathlib import Path

import numpy as np
import onnx_ir as ir
from optimizers import CONTEXT

from carryall.graph_opt.compare.verify import verify
from carryall.graph_opt.graph.load import load_model
from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import portable_passes

_PROMPT_TOKENS = (5, 24, 48)


def optimize(path: Path) -> tuple[ir.Model, dict[str, float]]:
    """Return the lowered graph, the seconds of each step and the number of nodes after it."""
    start = time.perf_counter()
    model = load_model(path)
    found = {"load": time.perf_counter() - start, "traced nodes": float(len(model.graph))}
    for name, passes in (
        ("portable", portable_passes()),
        ("cpu", slot_passes(SlotOptions(context_length=CONTEXT))),
    ):
        start = time.perf_counter()
        model, _ = run(model, passes)
        found |= {name: time.perf_counter() - start, f"{name} nodes": float(len(model.graph))}
    return model, found


def prompts(path: Path, count: int) -> list[list[int]]:
    """Return ``count`` random prompts of several lengths.

    Raises:
        SystemExit: the vocabulary size of the logits is dynamic.
    """
    output = next(value for value in ir.load(path).graph.outputs if value.name == "logits")
    size = output.shape[-1] if output.shape is not None else None
    if not isinstance(size, int):
        raise SystemExit(f"{path}: the vocabulary size of the logits is dynamic")
    rng = np.random.default_rng(1)
    lengths = (_PROMPT_TOKENS[number % len(_PROMPT_TOKENS)] for number in range(count))
    return [rng.integers(0, size, length).tolist() for length in lengths]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("work", type=Path)
    for name, default in (("rounds", 3), ("prompts", 3), ("tokens", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    rounds = [optimize(arguments.trace) for _ in range(arguments.rounds)]
    figures = {name: statistics.median(found[name] for _, found in rounds) for name in rounds[0][1]}
    for name, value in figures.items():
        print(f"{name:14} {value:.0f}" if name.endswith("nodes") else f"{name:14} {value:.2f} s", flush=True)
    arguments.work.mkdir(parents=True, exist_ok=True)
    lowered = arguments.work / "model.onnx"
    save_model(rounds[-1][0], lowered)
    found = verify(
        arguments.trace,
        lowered,
        prompts=prompts(arguments.trace, arguments.prompts),
        steps=arguments.tokens,
    )
    print(found.text())
    if arguments.json:
        arguments.json.write_text(json.dumps({**figures, **found.to_dict()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
