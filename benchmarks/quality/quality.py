"""Compare fidelity, size, speed and cost of carryall's, onnxruntime's and NNCF's quantization methods.

    python benchmarks/quality/quality.py FOLDER --onnxruntime PYTHON --nncf PYTHON --markdown FILE \\
        --chart FILE.svg
    python benchmarks/quality/quality.py FOLDER --stage speed draw --chart docs/quality.svg
    python benchmarks/quality/quality.py FOLDER --model MODEL --text FILE --only 'carryall-int[48]$' ...

Every tool quantizes the model's portable graph in its own process, by default the embedded model's. Wall
time, processor time and peak memory are those of the process, imports included. One evaluator runs all graphs
without lowering on a text, by default the embedded model's held-out text. carryall's graphs are evaluated and
timed once more after lowering for the CPU. Results are kept in FOLDER/quality.json: a result in this file is
not measured again, unless --again names it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quality_methods import METHODS, Method

from carryall.exporter.demo import demo_path

HELD_OUT = demo_path() / "heldout.txt"
STAGES = ("quantize", "evaluate", "speed", "draw")
Results = dict[str, dict[str, Any]]


def main() -> None:
    """Command line."""
    options = _options()
    file = options.folder / "quality.json"
    results: Results = json.loads(file.read_text()) if file.exists() else {}
    for key in options.again:
        results.pop(key, None)
    chosen = [
        method
        for method in METHODS
        if getattr(options, method.tool, sys.executable) and re.search(options.only, method.key)
    ]

    def keep(method: Method, facts: dict[str, Any]) -> None:
        results.setdefault(method.key, {}).update(facts)
        file.write_text(json.dumps(results, indent=1))
        print(method.key, facts, file=sys.stderr)

    if "quantize" in options.stage:  # first, because a child's peak memory includes its parent's at the fork
        pythons = {"carryall": sys.executable, "onnxruntime": options.onnxruntime, "nncf": options.nncf}
        quantize(chosen, options.folder, options.model, pythons, results, keep)
    done = [method for method in chosen if "error" not in results.get(method.key, {"error": ""})]
    if "evaluate" in options.stage:
        from quality_measure import Windows, evaluate

        windows = Windows(options.text, options.tokens, options.window, options.stride)
        evaluate(done, options.folder, windows, results, keep)
    if "speed" in options.stage:
        from quality_measure import speed

        speed([method for method in done if method.tool == "carryall"], options.folder, options.rounds, keep)
    if "draw" in options.stage:
        _draw(done, results, options)


def quantize(
    methods: list[Method],
    folder: Path,
    model: str,
    pythons: dict[str, str],
    results: Results,
    keep: Callable[[Method, dict[str, Any]], None],
) -> None:
    """Write the quantized graph of every method, with its cost and size."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "float").exists():
        subprocess.run([sys.executable, "-m", "carryall", "export", model, folder / "float"], check=True)
        subprocess.run([sys.executable, Path(__file__).with_name("quality_windows.py"), folder], check=True)
    for method in methods:
        if "seconds" in results.get(method.key, {}):
            continue
        shutil.rmtree(folder / method.key, ignore_errors=True)
        keep(method, _cost(method.command(pythons, folder), folder / f"{method.key}.log", folder / "cache"))
        if "error" not in results[method.key]:
            written = method.file(folder).parent.glob("model.*")
            keep(method, {"bytes": sum(path.stat().st_size for path in written)})


def _cost(command: list[str], log: Path, cache: Path) -> dict[str, Any]:
    """Run a command with an empty cache and return its seconds and peak memory, or its error."""
    shutil.rmtree(cache, ignore_errors=True)
    environment = {**os.environ, "CARRYALL_CACHE": str(cache), "OPENBLAS_NUM_THREADS": "1"}
    start = time.perf_counter()
    with log.open("w") as text:
        process = subprocess.Popen(command, stdout=text, stderr=text, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        return {"error": log.read_text().strip().splitlines()[-1:]}
    processor = usage.ru_utime + usage.ru_stime
    return {
        "seconds": round(seconds, 2),
        "processor_seconds": round(processor, 2),
        "peak_mb": round(usage.ru_maxrss / 1e3),
    }


def _draw(methods: list[Method], results: Results, options: argparse.Namespace) -> None:
    from quality_tables import table
    from tradeoff_chart import tradeoffs

    text = table(methods, results)
    if options.markdown is not None:
        options.markdown.write_text(text)
    print(text)
    if options.chart is not None:
        ours = {method.name: results[method.key] for method in methods if method.tool == "carryall"}
        options.chart.write_text(tradeoffs(ours))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of models and results")
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--again", nargs="+", default=[], metavar="KEY", help="measure these results again")
    parser.add_argument("--model", default="demo", help="MODEL of float weights that all tools quantize")
    parser.add_argument("--only", default="", metavar="REGEX", help="methods whose key has a match")
    parser.add_argument("--onnxruntime", metavar="PYTHON", help="interpreter with onnx, onnxruntime, torch")
    parser.add_argument("--nncf", metavar="PYTHON", help="interpreter with nncf and openvino")
    parser.add_argument("--text", type=Path, default=HELD_OUT, help="text that is evaluated")
    parser.add_argument("--tokens", type=int, default=8192, help="number of tokens of the text")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--stride", type=int, default=256, help="distance between windows")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the speed measurement")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--chart", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
