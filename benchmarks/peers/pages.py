"""Pages beside llama.cpp's mtmd and OpenVINO GenAI: the first token, a second question, requests beside it.

The engines answer in turns. The shapes are those of SmolVLM-256M with random weights, pages of 1,000 x 700
pixels become 5 tiles: llama.cpp has a decoder of the same shape in Q4_1, and ``--mmproj`` of the same tower.
OpenVINO GenAI's VLMPipeline reads another architecture, from a folder of optimum-intel.

    python benchmarks/peers/pages.py PACKAGE --llamacpp PYTHON --text TEXT.gguf --mmproj MMPROJ.gguf
    python benchmarks/peers/pages.py PACKAGE --genai PYTHON --ir FOLDER --form tower=int8,quantize=int8-fast
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).resolve().parents[1] / "workers"


class PageWorker:
    """A process that answers questions on pages.

    Args:
        python: its interpreter.
        script: a file of ``benchmarks/workers``.
        model: the model in the form of the script.
    """

    def __init__(self, python: str, script: str, model: str) -> None:
        command = [python, str(WORKERS / script), model]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.name = str(self._answer()["engine"])

    def ask(self, kind: str, seed: int, **options: int) -> dict[str, Any]:
        """Return the timing of a question."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"kind": kind, "seed": seed, **options}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} has ended")
        return json.loads(line)


def measure(workers: Sequence[PageWorker], rounds: int) -> list[dict[str, Any]]:
    """Return each answer as a row with round, engine and kind; the first ones of carryall are left out."""
    for number, worker in enumerate(workers):
        worker.ask("text", 10_000 + number)
        if worker.name.startswith("carryall"):
            worker.ask("page", 10_000 + number)  # the tower is prepared for the processor
    rows = []
    for number in range(rounds):
        for worker in workers[number % len(workers) :] + workers[: number % len(workers)]:
            for kind in ("text", "page", "second"):
                rows.append({"round": number, "engine": worker.name, "kind": kind} | worker.ask(kind, number))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if worker.name.startswith("carryall"):
                row = worker.ask("beside", 1000 + number)
                rows.append({"round": number, "engine": worker.name, "kind": "beside"} | row)
                print(json.dumps({**rows[-1], "gaps_s": []}), file=sys.stderr, flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the medians over the rounds, as lines of Markdown."""
    lines = [
        "| engine | question | first token | processor time | between tokens |",
        "| --- |" + " --- |" * 4,
    ]
    for engine in dict.fromkeys(row["engine"] for row in rows):
        for kind in ("text", "page", "second"):
            here = [row for row in rows if (row["engine"], row["kind"]) == (engine, kind)]
            first, spent, step = (
                statistics.median(row[name] for row in here)
                for name in ("first_token_s", "processor_s", "step_s")
            )
            lines.append(f"| {engine} | {kind} | {first:.2f} s | {spent:.2f} s | {1000 * step:.0f} ms |")
    for row in rows:
        if row["kind"] == "beside":
            cut = row["gaps_s"].index(-1.0)
            alone, during = _gaps(row["gaps_s"][:cut]), _gaps(row["gaps_s"][cut + 1 :])
            lines.append(f"{row['engine']}, tokens of another request: alone {alone}; beside a page {during}")
    return "\n".join(lines)


def _gaps(values: Sequence[float]) -> str:
    ordered = sorted(values)
    if not ordered:
        return "none"
    told = (f"p{share} {1000 * ordered[len(ordered) * share // 100]:.0f} ms" for share in (50, 99))
    return f"{len(ordered)} gaps, {', '.join(told)}"


def main() -> None:
    """Run the engines in turns and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", help="an exported model that sees")
    parser.add_argument("--llamacpp", help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--text", help="GGUF file of a decoder")
    parser.add_argument("--mmproj", action="append", default=[], help="GGUF file of the tower; repeatable")
    parser.add_argument("--genai", help="interpreter of an environment with openvino-genai")
    parser.add_argument("--ir", action="append", default=[], help="folder[,PROPERTY=VALUE]; repeatable")
    parser.add_argument("--form", action="append", help="of carryall: options of the provider, or quantize")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    forms = [form and f",{form}" for form in args.form or ("", "tower=int8")]
    workers = [PageWorker(sys.executable, "carryall_pages.py", args.package + form) for form in forms]
    workers += [PageWorker(args.llamacpp, "llamacpp_pages.py", f"{args.text},{each}") for each in args.mmproj]
    workers += [PageWorker(args.genai, "genai_pages.py", each) for each in args.ir]
    rows = measure(workers, args.rounds)
    for worker in workers:
        worker.close()
    print(table(rows))
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
