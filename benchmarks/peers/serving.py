"""Compare carryall's engine with other engines and with static batching on traces of requests.

    python benchmarks/peers/serving.py --rounds 3 \\
        --engine carryall=.venv/bin/python:carryall_engine:models/qwen3-int4 \\
        --engine openvino=envs/ov/bin/python:ov_engine:models/ov-int4-128 \\
        --engine genai=envs/ort/bin/python:genai_engine:models/genai-int4 --json engine.json

Engines take turns within a round, and each round starts with another engine. The first engine must be
carryall: it also serves the mixed trace in static batches, and measures the inter-token latency while a
prompt of 2,000 tokens arrives and the part of a decode step outside of the model. ``--requests 6 --scale
0.2`` is a short run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from turns import Worker, add_engines, opened

_SETTLE_SECONDS = 0.5  # threads of the previous engine may still spin
_STATIC_BATCHES = (8, 32)
_SHARED_REQUESTS = 16
_FIRST_SEED = 1  # each round has new texts, as prefix caches hold those of the last round


def measurements(requests: int, scale: float) -> dict[str, dict[str, Any]]:
    """Return what is measured: name -> fields of ``Trace`` of ``workers/traces.py``."""
    mixed = {"kind": "mixed", "requests": requests, "scale": scale}
    works: dict[str, dict[str, Any]] = {
        "mixed": mixed,
        "shared": {"kind": "shared", "requests": min(requests, _SHARED_REQUESTS)},
    }
    works |= {f"static {batch}": mixed | {"batch": batch} for batch in _STATIC_BATCHES}
    works["latency"] = {"kind": "latency", "requests": 4}
    works["overhead"] = {"kind": "overhead", "requests": 32}
    return works


def able(worker: Worker, name: str, first: Worker) -> bool:
    """Return whether an engine takes part in a measurement.

    Only carryall runs the measurements of itself, and static engines (genai) have no prefix cache.
    """
    return worker is first or name == "mixed" or (name == "shared" and "static" not in worker.ready["engine"])


def run(workers: list[Worker], works: dict[str, dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
    """Run one unrecorded warm-up round on a part of the trace, then ``rounds`` recorded rounds."""
    records = []
    for number in range(-1, rounds):
        turn = number % len(workers)
        for name, work in works.items():
            for worker in workers[turn:] + workers[:turn]:
                if not able(worker, name, workers[0]):
                    continue
                time.sleep(_SETTLE_SECONDS)
                warm_up = {"requests": min(4, work["requests"])} if number < 0 else {}
                answer = worker.ask(work | warm_up | {"seed": _FIRST_SEED + number})
                if number >= 0:
                    records.append({"work": name, "engine": worker.name, "round": number, **answer})
                    print(f"{name} {worker.name}: {answer}", file=sys.stderr, flush=True)
            print(f"round {number} {name}: load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return records


def summarise(records: list[dict[str, Any]], first: str) -> str:
    """Return medians as a Markdown table; ratios are the first engine's continuous batching to the row."""
    lines = [
        "| trace | engine | tokens/s | spread | carryall is faster by |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    rates: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if record["generated"]:
            rate = record["generated"] / record["seconds"]
            rates.setdefault((record["work"], record["engine"]), []).append(rate)
    for (work, engine), values in rates.items():
        reference = ("shared" if work == "shared" else "mixed", first)
        middle = statistics.median(values)
        ratio = statistics.median(rates[reference]) / middle
        spread = (max(values) - min(values)) / middle
        lines.append(f"| {work} | {engine} | {middle:.1f} | {spread:.0%} | {ratio:.2f}x |")
    return "\n".join([*lines, "", *_own_figures(records)])


def _own_figures(records: list[dict[str, Any]]) -> list[str]:
    """Return lines about carryall's latency and overhead, if measured."""
    medians: dict[str, float] = {}
    for work in ("latency", "overhead"):
        mine = [record for record in records if record["work"] == work]
        for field in mine[0] if mine else ():
            if isinstance(mine[0][field], float):
                medians[field] = statistics.median(record[field] for record in mine)
    lines = []
    if "disturbed_p95" in medians:
        ratio = medians["disturbed_p95"] / medians["undisturbed_p95"]
        lines.append(
            "Inter-token latency, p95 of 4 streams: {undisturbed_p95:.1f} ms; {disturbed_p95:.1f} ms while a "
            "2,000-token prompt arrives".format(**medians)
            + f" ({ratio:.2f}x), which gets its first token after {medians['first_token_s']:.1f} s."
        )
    if "share" in medians:
        lines.append(
            "Batch 32: a decode step spends {model_ms:.1f} ms in the model and {rest_ms:.2f} ms "
            "outside of it ({share:.1%}).".format(**medians)
        )
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engines(parser)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the mixed trace's lengths")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", action="append", help="measure only this: mixed, shared, latency, ...; may be repeated"
    )
    parser.add_argument("--json", type=Path, help="write every measurement here")
    options = parser.parse_args()
    workers = opened(options.engine)
    works = measurements(options.requests, options.scale)
    works = {name: work for name, work in works.items() if not options.only or name in options.only}
    records = run(workers, works, options.rounds)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))
    for worker in workers:
        worker.close()
    print(summarise(records, workers[0].name))


if __name__ == "__main__":
    main()
