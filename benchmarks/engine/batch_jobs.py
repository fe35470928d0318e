"""Measure the overhead of a batch job over the bare engine: reading, tokenizing, journal and output.

    python benchmarks/engine/batch_jobs.py --prompts 10000 --json batch_jobs.json

Both answer the same prompts on one engine of the embedded model. The prompts are split into pieces, and job
and engine take turns on each piece, so that other load on the machine affects both equally. The bare engine
gets all requests of a piece at once, in the order of the input, and discards the outputs. The job reads a
file and writes a file. Loading the model is not counted. The prompts are lines of code; ``--shared`` of them
begin with one of a few long instructions.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from carryall.runtime.api.requests import RequestFactory
from carryall.runtime.batch.execute import execute
from carryall.runtime.batch.inputs.lines import COMPLETIONS, BatchLine
from carryall.runtime.batch.jobs.journal import Answer
from carryall.runtime.batch.spec import BatchSpec
from carryall.runtime.batch.workers.endpoints import Preparer
from carryall.runtime.batch.workers.offline import OfflineEngine
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.models.loading import load_model

INSTRUCTIONS = 8
WORDS = (
    "self",
    "value",
    "name",
    "data",
    "path",
    "index",
    "result",
    "key",
    "item",
    "node",
    "parse",
    "read",
    "write",
)


def prompts(count: int, shared: float, seed: int) -> list[dict[str, Any]]:
    """Return request bodies; the fraction ``shared`` begins with one of ``INSTRUCTIONS`` long texts."""
    draw = random.Random(seed)
    long = [" ".join(draw.choices(WORDS, k=60)) for _ in range(INSTRUCTIONS)]
    bodies = []
    for _ in range(count):
        name = "_".join(draw.choices(WORDS, k=draw.randint(1, 12)))
        own = f"def {name}({', '.join(draw.choices(WORDS, k=3))}):"
        begin = f'"""{draw.choice(long)}"""\n' if draw.random() < shared else ""
        bodies.append({"prompt": begin + own, "max_tokens": draw.randint(4, 24)})
    return bodies


class SharedExecutor:
    """An executor that keeps its engine open after a job."""

    def __init__(self, inner: OfflineEngine) -> None:
        self._inner = inner

    def run(self, lines: Iterator[BatchLine], stop: threading.Event) -> Iterator[Answer]:
        """Answer lines."""
        return self._inner.run(lines, stop)

    def facts(self) -> dict[str, Any]:
        """Return no facts for the journal."""
        return {}

    def close(self) -> None:
        """Do nothing: the engine serves the next job."""


def bare(engine: Engine, preparer: Preparer, bodies: list[dict[str, Any]]) -> tuple[float, int]:
    """Return seconds and tokens of a piece on the engine alone; creating the requests is not counted."""
    lines = [BatchLine(n, str(n), COMPLETIONS, body) for n, body in enumerate(bodies)]
    requests = [preparer.prepare(line).groups[0].requests[0] for line in lines]
    begin = time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - begin, sum(len(request.output_token_ids) for request in requests)


def job(executor: SharedExecutor, bodies: list[dict[str, Any]], folder: Path) -> tuple[float, int]:
    """Return seconds and tokens of a piece as a job, from input file to output file."""
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    spec = BatchSpec(inputs=[str(source)], output=str(folder / "out.jsonl"), model="demo")
    loaded: list[float] = []

    def tell(event: str, facts: dict[str, Any]) -> None:
        if event == "loaded":
            loaded.append(time.perf_counter())

    scanned = time.perf_counter()
    outcome = execute(spec, restart=True, tell=tell, open_executor=lambda *_: executor)
    end = time.perf_counter()
    print(f"  before the first line {loaded[0] - scanned:.2f} s", file=sys.stderr)
    return end - loaded[0], outcome.totals.completion_tokens


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return tokens per second of both for each piece."""
    loaded = load_model("demo", provider=arguments.provider, max_slots=arguments.slots)
    engine = Engine(loaded.runner, EngineConfig(max_step_slowdown=math.inf), None, loaded.identity)
    sampling = {"temperature": 0.0, "ignore_eos": True}
    preparer = Preparer(RequestFactory(loaded), "demo", defaults=sampling)
    executor = SharedExecutor(OfflineEngine(engine, preparer, window=arguments.window))
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(-1, arguments.pieces):
            size = min(100, arguments.prompts) if number < 0 else arguments.prompts // arguments.pieces
            bodies = prompts(size, arguments.shared, number)
            sides = {"engine": lambda b=bodies: bare(engine, preparer, b),
                     "job": lambda b=bodies: job(executor, b, Path(folder))}  # fmt: skip
            found: dict[str, tuple[float, int]] = {}
            for name in list(sides)[:: 1 if number % 2 else -1]:
                engine.clear_prefix_cache()
                found[name] = sides[name]()
            assert found["engine"][1] == found["job"][1], (
                "engine and job must generate the same number of tokens"
            )
            if number >= 0:
                rates = {name: tokens / seconds for name, (seconds, tokens) in found.items()}
                records.append({"piece": number, "prompts": size, **rates})
                share = rates["job"] / rates["engine"]
                print(f"{number}: {rates} {share:.3f}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    executor.close()
    engine.close()
    return records


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--pieces", type=int, default=5)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--shared", type=float, default=0.0, help="share of prompts with a common prefix")
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    records = measure(arguments)
    shares = [record["job"] / record["engine"] for record in records]
    seconds = {side: sum(r["prompts"] / r[side] for r in records) for side in ("engine", "job")}
    print(
        f"{sum(r['prompts'] for r in records)} prompts: the job reaches "
        f"{100 * seconds['engine'] / seconds['job']:.1f} % of the bare engine "
        f"(pieces: median {100 * statistics.median(shares):.1f}, least {100 * min(shares):.1f})"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"arguments": vars(arguments), "pieces": records}, default=str))


if __name__ == "__main__":
    main()
