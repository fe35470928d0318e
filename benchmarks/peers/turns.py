"""Compare carryall with other engines on the same machine in the same run.

Every engine is a worker process in its own environment (``benchmarks/workers/``). Engines take turns in each
round, so that changes of clock speed and other load affect all of them, and each round starts with another
engine. Figures are medians over rounds. Compare ratios within a run, not figures of different runs.

    python benchmarks/peers/turns.py --work 256x64x1 --rounds 5 \\
        --engine carryall=.venv/bin/python:carryall_llm:models/qwen3-int4 \\
        --engine genai=envs/ort/bin/python:ort_genai:models/genai-int4 \\
        --engine openvino=envs/ov/bin/python:ov_genai:models/ov-int4-128 --json peers.json

On a machine with other load use ``taskset -c 0`` in front and ``--cpu-time``: each engine then has one
thread, since others spin while they wait, and the processor time of its process is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

WORKERS = Path(__file__).resolve().parents[1] / "workers"
_SETTLE_SECONDS = 0.5  # threads of the previous engine may still spin


@dataclass(frozen=True)
class Work:
    """Prompt tokens x new tokens x batch."""

    prompt_tokens: int
    new_tokens: int
    batch: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``256x64x1``."""
        return cls(*(int(part) for part in text.split("x")))


class Worker:
    """One engine in its own process, with requests and answers as JSON lines over pipes."""

    def __init__(
        self, name: str, python: str, script: str, model: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        command = [python, str(WORKERS / f"{script}.py"), model]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- open as long as the process lives
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self.ready = self._read()

    def measure(self, work: Work, seed: int) -> dict[str, Any]:
        """Run ``work`` once and return its timing.

        Raises:
            RuntimeError: the engine generated another number of tokens, or ended.
        """
        timing = self.ask(asdict(work) | {"seed": seed})
        expected = work.batch * work.new_tokens
        if timing["generated"] != expected:
            raise RuntimeError(f"{self.name} generated {timing['generated']} tokens instead of {expected}")
        return timing

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            RuntimeError: the process ended; the message has the end of its log.
        """
        if self._process.stdin is None:
            raise RuntimeError("the worker has no input pipe")
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"{self.name} ended with exit code {code}:\n{self._log.read()[-2000:]}")
        message: dict[str, Any] = json.loads(line)
        return message


def add_engines(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--engine``."""
    parser.add_argument("--engine", action="append", required=True, metavar="NAME=PYTHON:WORKER:MODEL")


def opened(engines: list[str], *, cpu_time: bool = False) -> list[Worker]:
    """Start the workers of ``--engine`` options, which count processor time if ``cpu_time``."""
    workers, environment = [], os.environ | ({"BENCHMARK_CPU_TIME": "1"} if cpu_time else {})
    for text in engines:
        name, _, rest = text.partition("=")
        python, script, model = rest.split(":", 2)
        workers.append(Worker(name, python, script, model, environment))
        print(f"{name}: {workers[-1].ready}", file=sys.stderr)
    return workers


def run(workers: list[Worker], works: list[Work], rounds: int) -> list[dict[str, Any]]:
    """Run one unrecorded warm-up round, then ``rounds`` recorded ones; engines take turns."""
    records = []
    for number in range(-1, rounds):
        first = number % len(workers)
        for work in works:
            for worker in workers[first:] + workers[:first]:
                time.sleep(_SETTLE_SECONDS)
                timing = worker.measure(work, seed=1000 + number)
                if number >= 0:
                    records.append({"engine": worker.name, "round": number, **asdict(work), **timing})
            print(f"round {number} {work}: load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return records


def summarise(records: list[dict[str, Any]], reference: str) -> list[dict[str, Any]]:
    """Return medians per engine and work, with the ratio of the engine ``reference`` to each."""
    rows = []
    for key in dict.fromkeys((r["prompt_tokens"], r["new_tokens"], r["batch"], r["engine"]) for r in records):
        prompt, new, batch, engine = key
        mine = [r for r in records if (r["prompt_tokens"], r["new_tokens"], r["batch"], r["engine"]) == key]
        prefill = [batch * prompt / r["prefill_s"] for r in mine]
        decode = [batch / r["step_s"] for r in mine]
        rows.append(
            {
                "work": f"{prompt}x{new}x{batch}",
                "engine": engine,
                "prefill_tps": statistics.median(prefill),
                "decode_tps": statistics.median(decode),
                "decode_spread": (max(decode) - min(decode)) / statistics.median(decode),
                "peak_rss_mb": max(r["peak_rss_mb"] for r in mine),
            }
        )
    for row in rows:
        base = next(r for r in rows if r["work"] == row["work"] and r["engine"] == reference)
        row["prefill_ratio"] = base["prefill_tps"] / row["prefill_tps"]
        row["decode_ratio"] = base["decode_tps"] / row["decode_tps"]
    return rows


def table(rows: list[dict[str, Any]], reference: str) -> str:
    """Return the summary as a Markdown table."""
    lines = [
        "| prompt x new x batch | engine | prefill tok/s | decode tok/s | spread | peak MB "
        f"| {reference} is faster by |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    lines.extend(
        f"| {r['work']} | {r['engine']} | {r['prefill_tps']:.0f} | {r['decode_tps']:.1f} "
        f"| {r['decode_spread']:.0%} | {r['peak_rss_mb']:.0f} "
        f"| prefill {r['prefill_ratio']:.2f}x, decode {r['decode_ratio']:.2f}x |"
        for r in rows
    )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engines(parser)
    parser.add_argument("--work", action="append", type=Work.parse, metavar="PROMPTxNEWxBATCH")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cpu-time", action="store_true", help="count processor seconds; run under taskset with one core"
    )
    parser.add_argument("--json", type=Path, help="write every measurement and the summary here")
    options = parser.parse_args()
    workers = opened(options.engine, cpu_time=options.cpu_time)
    records = run(workers, options.work or [Work(256, 64, 1)], options.rounds)
    rows = summarise(records, workers[0].name)
    print(table(rows, workers[0].name))
    if options.json:
        engines = {w.name: w.ready["engine"] for w in workers}
        report = {"machine": platform.processor() or platform.machine(), "cpus": os.cpu_count()}
        options.json.write_text(
            json.dumps(report | {"engines": engines, "summary": rows, "records": records}, indent=1)
        )
    for worker in workers:
        worker.close()


if __name__ == "__main__":
    main()
