"""Compare carryall with other engines, each at its defaults, on this machine: one command.

    python benchmarks/peers/compare.py FOLDER
    python benchmarks/peers/compare.py FOLDER --model smollm2 --engine "OpenVINO GenAI" --quick

Makes in FOLDER, once, an environment with pinned packages for each engine, the models and each engine's
4-bit form of them, about 15 GB and an hour. Then all engines run in turn, and FOLDER/results gets a table, a
chart and all figures of each model. Compare ratios only: the machine's speed changes within an hour.
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
import report
from environments import python_of

from carryall.providers.host.machine import memory_bandwidth


@dataclass(frozen=True)
class Engine:
    """How an engine is run: its environment (None: this one), model, workers and settings of the worker."""

    name: str
    environment: str | None
    model: Callable[[Path, str], Path | None]
    decode: str
    trace: str | None
    settings: str = ""

    def enter(self, folder: Path, model: str) -> measures.Contestant | None:
        """Make what the engine needs; None if it cannot run the model."""
        path = self.model(folder, model)
        if path is None:
            return None
        python = Path(sys.executable) if self.environment is None else python_of(folder, self.environment)
        return measures.Contestant(self.name, python, f"{path}{self.settings}", self.decode, self.trace)


ENGINES = (
    Engine("carryall", None, models.carryall_model, "carryall_llm", "carryall_engine"),
    Engine(
        "carryall on OpenVINO",
        None,
        models.carryall_model,
        "carryall_llm",
        "carryall_engine",
        ",provider=openvino",
    ),
    Engine("OpenVINO GenAI", "openvino", models.openvino_model, "ov_genai", "ov_engine"),
    Engine("onnxruntime-genai", "genai", models.genai_model, "ort_genai", "genai_engine"),
    Engine("llama.cpp", "llama.cpp", models.llamacpp_model, "llamacpp", None),
)


def compare(folder: Path, model: str, engines: list[Engine], plan: measures.Plan) -> str:
    """Measure the engines on a model, write the results after each part and return the page."""
    entered = [engine.enter(folder, model) for engine in engines]
    contestants = [one for one in entered if one is not None]
    results = folder / "results"
    results.mkdir(exist_ok=True)
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "read bandwidth in GB/s": round(memory_bandwidth(), 1),
        "load": round(os.getloadavg()[0], 1),
    }

    def keep(figures: Sequence[measures.Figure], versions: dict[str, str]) -> None:
        report.write(results, model, figures, versions, machine)

    measures.run(contestants, plan, keep)
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="short works, to see that all engines run")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    chosen = [e for e in ENGINES if not options.engine or e.name in (names[0], *options.engine)]
    plan = measures.QUICK if options.quick else measures.Plan(rounds=options.rounds)
    for model in options.model or models.MODELS:
        print(compare(options.folder.resolve(), model, chosen, plan))


if __name__ == "__main__":
    main()
