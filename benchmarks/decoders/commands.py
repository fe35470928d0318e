"""Measure wall time and peak memory of whole commands that run in turn, for example of exporters.

    python benchmarks/decoders/commands.py --rounds 3 --clean out \\
        --command carryall="carryall export models/qwen3 out --quantize int4" \\
        --command genai="python -m onnxruntime_genai.models.builder -m models/qwen3 -o out -p int4 -e cpu"

Peak memory is the largest resident set of the command's process. The folder of ``--clean`` is removed before
each run, outside the measured time. Prints a Markdown table; ratios are relative to the first command.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path


def measure(command: str) -> tuple[float, float]:
    """Run a command and return wall seconds and peak resident MB.

    Raises:
        RuntimeError: the command failed.
    """
    start = time.perf_counter()
    process = subprocess.Popen(shlex.split(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {command}")
    return seconds, usage.ru_maxrss / 1e3


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--command", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clean", type=Path, help="folder to remove before each run")
    parser.add_argument("--json", type=Path, help="write every measurement here")
    options = parser.parse_args()
    commands = dict(text.split("=", 1) for text in options.command)
    records: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for number in range(options.rounds):
        for name, command in commands.items():
            if options.clean is not None:
                shutil.rmtree(options.clean, ignore_errors=True)
            records[name].append(measure(command))
            seconds, peak = records[name][-1]
            load = os.getloadavg()[0]
            print(f"round {number}: {name} {seconds:.2f} s, {peak:.0f} MB, load {load:.1f}", file=sys.stderr)
    if options.json is not None:
        options.json.write_text(json.dumps(records, indent=1))
    print(table(records))


def table(records: dict[str, list[tuple[float, float]]]) -> str:
    """Return medians as a Markdown table, with each command's ratio to the first."""
    medians = {
        name: [statistics.median(part) for part in zip(*runs, strict=True)] for name, runs in records.items()
    }
    base = next(iter(medians.values()))
    lines = [
        "| command | seconds | peak MB | time, times the first | memory |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, (seconds, peak) in medians.items():
        lines.append(
            f"| {name} | {seconds:.1f} | {peak:.0f} | {seconds / base[0]:.2f} | {peak / base[1]:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
