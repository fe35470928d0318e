"""Compare carryall with other engines, each at its defaults, on this machine: one command.

    python benchmarks/peers/compare.py FOLDER
    python benchmarks/peers/compare.py FOLDER --model smollm2 --engine "OpenVINO GenAI" --quick

Makes in FOLDER, once, an environment with pinned packages for each engine, the models and each engine's
4-bit form of them, about 20 GB and an hour. Then all engines run in turn, and FOLDER/results gets a table,
charts and all figures of each model. Compare ratios only: the machine's speed changes within an hour.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import measures
import models
import plots
import report
from environments import python_of
from fidelity import fidelity

from carryall.providers.host.machine import memory_bandwidth


@dataclass(frozen=True)
class Engine:
    """How an engine is run: its environment (None: this one), model, workers and settings of the worker."""

    name: str
    environment: str | None
    model: Callable[[Path, str], Path]
    decode: str
    trace: str | None
    logits: str
    settings: str = ""

    def enter(self, folder: Path, model: str) -> measures.Contestant:
        """Make what the engine needs."""
        path = self.model(folder, model)
        python = Path(sys.executable) if self.environment is None else python_of(folder, self.environment)
        location = f"{path}{self.settings}"
        return measures.Contestant(self.name, python, location, self.decode, self.trace, self.logits)


ENGINES = (
    Engine("carryall", None, models.carryall_model, "carryall_llm", "carryall_engine", "carryall"),
    Engine(
        "carryall on OpenVINO",
        None,
        models.carryall_model,
        "carryall_llm",
        "carryall_engine",
        "carryall_on_openvino",
        ",provider=openvino",
    ),
    Engine("OpenVINO GenAI", "openvino", models.openvino_model, "ov_genai", "ov_engine", "openvino"),
    Engine("onnxruntime-genai", "genai", models.genai_model, "ort_genai", "genai_engine", "genai"),
    Engine("llama.cpp", "llama.cpp", models.llamacpp_model, "llamacpp", None, "llamacpp"),
    Engine("vLLM", "vllm", models.vllm_model, "vllm_cpu", "vllm_engine", "vllm"),
)


def compare(folder: Path, model: str, engines: list[Engine], plan: measures.Plan) -> str:
    """Measure the engines on a model, write the results after each part and return the page."""
    contestants = [engine.enter(folder, model) for engine in engines]
    results = folder / "results"
    results.mkdir(exist_ok=True)
    bandwidth, peak = memory_bandwidth(), plots.int8_peak()
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "read bandwidth in GB/s": round(bandwidth, 1),
        "int8 operations a second, 10^9": round(peak / 1e9),
        "load": round(os.getloadavg()[0], 1),
    }

    checkpoint = models.checkpoint(folder, model)
    roofline = plots.Roofline(checkpoint, contestants, plan, bandwidth * 1e9, peak)

    def keep(figures: Sequence[measures.Figure], versions: dict[str, str]) -> None:
        report.write(results, model, figures, versions, machine)
        plots.write_plots(results, model, figures, plan, roofline)

    figures, versions = measures.run(contestants, plan, keep)
    if model == models.REAL:
        torch = python_of(folder, "genai")
        keep([*figures, *fidelity(contestants, checkpoint, torch)], versions)
    return (results / f"{model}.md").read_text(encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [engine.name for engine in ENGINES]
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", action="append", choices=models.MODELS, help="default: all")
    parser.add_argument(
        "--engine", action="append", choices=names[1:], help="a peer of carryall; default: all"
    )
    parser.add_argument("--rounds", type=int, default=measures.Plan.rounds)
    parser.add_argument("--quick", action="store_true", help="short works, to see that all engines run")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    chosen = [e for e in ENGINES if not options.engine or e.name in (names[0], *options.engine)]
    plan = measures.QUICK if options.quick else measures.Plan(rounds=options.rounds)
    for model in options.model or models.MODELS:
        print(compare(options.folder.resolve(), model, chosen, plan))


if __name__ == "__main__":
    main()
