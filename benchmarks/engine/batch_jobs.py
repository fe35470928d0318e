"""Measure the throughput of a batch job against the engine's own: reading, journal and output cost time.

    python benchmarks/engine/batch_jobs.py --prompts 10000 --json batch_jobs.json

Three sides answer the same prompts with the embedded model. ``generate`` is ``LLM.generate``: texts in, texts
out. ``engine`` is the bare engine: it gets all requests of a piece ready-made, and discards the outputs.
``job`` reads a file and writes a file. The prompts are split into pieces, and the sides take turns on each
piece, so that other load on the machine affects all equally. Loading the model is not counted. The prompts
are lines of code; ``--shared`` of them begin with one of a few long instructions.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carryall.runtime.api.llm import LLM
from carryall.runtime.api.requests import RequestFactory
from carryall.runtime.batch.execute import execute
from carryall.runtime.batch.inputs.lines import COMPLETIONS, BatchLine
from carryall.runtime.batch.jobs.journal import LineResult
from carryall.runtime.batch.spec import BatchSpec
from carryall.runtime.batch.workers.endpoints import Preparer
from carryall.runtime.batch.workers.offline import OfflineEngine
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.models.loading import load_model
from carryall.runtime.types.sampling_params import SamplingParams

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


@dataclass(frozen=True)
class Seconds:
    """How long something took, by the clock and in CPU time of all threads."""

    wall: float
    cpu: float


class Clock:
    """A moment."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def passed(self) -> Seconds:
        """The time since then."""
        return Seconds(time.perf_counter() - self.wall, time.process_time() - self.cpu)


class SharedExecutor:
    """An executor that keeps its engine open after a job."""

    def __init__(self, inner: OfflineEngine) -> None:
        self._inner = inner

    def run(self, lines: Iterator[BatchLine], stop: threading.Event) -> Iterator[LineResult]:
        """Answer lines."""
        return self._inner.run(lines, stop)

    def facts(self) -> dict[str, Any]:
        """Return no facts for the journal."""
        return {}

    def close(self) -> None:
        """Do nothing: the engine serves the next job."""


def bare(engine: Engine, preparer: Preparer, bodies: list[dict[str, Any]]) -> tuple[Seconds, int]:
    """Return seconds and tokens of a piece on the engine alone; creating the requests is not counted."""
    lines = [BatchLine(n, str(n), COMPLETIONS, body) for n, body in enumerate(bodies)]
    requests = [preparer.prepare(line).groups[0].requests[0] for line in lines]
    begin = Clock()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return begin.passed(), sum(len(request.output_token_ids) for request in requests)


def generate(llm: LLM, preparer: Preparer, bodies: list[dict[str, Any]]) -> tuple[Seconds, int]:
    """Return seconds and tokens of a piece through ``LLM.generate``."""
    params = [SamplingParams(max_tokens=body["max_tokens"], **preparer.defaults) for body in bodies]
    begin = Clock()
    outputs = llm.generate([body["prompt"] for body in bodies], params)
    texts = [output.outputs[0].text for output in outputs]
    took = begin.passed()
    assert all(isinstance(text, str) for text in texts)
    return took, sum(len(output.outputs[0].token_ids) for output in outputs)


def job(executor: SharedExecutor, bodies: list[dict[str, Any]], folder: Path) -> tuple[Seconds, int]:
    """Return seconds and tokens of a piece as a job, from input file to output file."""
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    spec = BatchSpec(inputs=[str(source)], output=str(folder / "out.jsonl"), model="demo")
    loaded: list[Clock] = []

    def tell(event: str, facts: dict[str, Any]) -> None:
        if event == "loaded":
            loaded.append(Clock())

    scanned = time.perf_counter()
    outcome = execute(spec, restart=True, tell=tell, open_executor=lambda *_: executor)
    took = loaded[0].passed()
    print(f"  before the first line {loaded[0].wall - scanned:.2f} s", file=sys.stderr)
    return took, outcome.totals.completion_tokens


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return tokens per second of both for each piece."""
    loaded = load_model("demo", provider=arguments.provider, max_slots=arguments.slots)
    engine = Engine(loaded.runner, EngineConfig(max_step_slowdown=math.inf), None, loaded.identity)
    sampling = {"temperature": 0.0, "ignore_eos": True}
    preparer = Preparer(RequestFactory(loaded, EngineConfig()), "demo", defaults=sampling)
    llm = LLM(loaded, engine_config=EngineConfig(max_step_slowdown=math.inf))
    executor = SharedExecutor(OfflineEngine(engine, preparer, window=arguments.window))
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(-1, arguments.pieces):
            size = min(100, arguments.prompts) if number < 0 else arguments.prompts // arguments.pieces
            bodies = prompts(size, arguments.shared, number)
            sides = {"engine": lambda b=bodies: bare(engine, preparer, b),
                     "generate": lambda b=bodies: generate(llm, preparer, b),
                     "job": lambda b=bodies: job(executor, b, Path(folder))}  # fmt: skip
            found: dict[str, tuple[Seconds, int]] = {}
            for name in list(sides)[:: 1 if number % 2 else -1]:
                found[name] = sides[name]()
                engine.clear_prefix_cache()  # the engines share the slots of one runner
                llm.clear_prefix_cache()
            assert len({tokens for _, tokens in found.values()}) == 1, "the sides must generate equally much"
            if number >= 0:
                rates = {name: tokens / took.wall for name, (took, tokens) in found.items()}
                cpu = {f"{name}_cpu": took.cpu for name, (took, _) in found.items()}
                records.append({"piece": number, "prompts": size, **rates, **cpu})
                print(f"{number}: {rates}, CPU {cpu}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
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
    for side in ("generate", "engine"):
        shares = [record["job"] / record[side] for record in records]
        seconds = {name: sum(r["prompts"] / r[name] for r in records) for name in (side, "job")}
        cpu = sum(r["job_cpu"] for r in records) / sum(r[f"{side}_cpu"] for r in records)
        print(
            f"{sum(r['prompts'] for r in records)} prompts: the job reaches "
            f"{100 * seconds[side] / seconds['job']:.1f} % of {side} "
            f"(pieces: median {100 * statistics.median(shares):.1f}, least {100 * min(shares):.1f}), with "
            f"{cpu:.3f} times its CPU time"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"arguments": vars(arguments), "pieces": records}, default=str))


if __name__ == "__main__":
    main()
