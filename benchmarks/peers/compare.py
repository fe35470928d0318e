"""Compare carryall with other engines, each at its defaults, on this machine: one command.

    python benchmarks/peers/compare.py FOLDER
    python benchmarks/peers/compare.py FOLDER --model smollm2 --engine "OpenVINO GenAI" --quick
    python benchmarks/peers/compare.py FOLDER --model gguf:model-Q4_K_M.gguf --engine llama.cpp
    python benchmarks/peers/compare.py FOLDER --model qwen3-8b:4 --engine llama.cpp --quantizing

Makes in FOLDER, once, an environment with pinned packages for each engine, the models and each engine's
4-bit form of them, about 20 GB and an hour. Then all engines run in turn, and FOLDER/results gets a table,
charts and all figures of each model. Compare ratios only: the machine's speed changes within an hour.

A model is ``smollm2``, a shape with random weights (``qwen3-8b``, or ``qwen3-8b:4`` with 4 layers), or
``gguf:FILE``, which each engine that reads GGUF opens as it is; of a file, first contact is measured too:
seconds from the typed command to the first token, with nothing prepared and again.
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
from first_contact import first_contacts
from quantizing import quantizings

from carryall.providers.host.machine import memory_bandwidth


@dataclass(frozen=True)
class Engine:
    """How an engine is run: its environment (None: this one), model, workers and settings of the worker.

    ``starts`` is the name in ``first_contact.py`` of an engine that opens GGUF files.
    """

    name: str
    environment: str | None
    model: Callable[[Path, str], Path]
    decode: str
    trace: str | None
    logits: str
    settings: str = ""
    starts: str | None = None

    def enter(self, folder: Path, model: str) -> measures.Contestant:
        """Make what the engine needs."""
        path = self.model(folder, model)
        python = Path(sys.executable) if self.environment is None else python_of(folder, self.environment)
        location = f"{path}{self.settings}"
        return measures.Contestant(self.name, python, location, self.decode, self.trace, self.logits)


ENGINES = (
    Engine(
        "carryall",
        None,
        models.carryall_model,
        "carryall_llm",
        "carryall_engine",
        "carryall",
        starts="carryall",
    ),
    Engine(
        "carryall on OpenVINO",
        None,
        models.carryall_model,
        "carryall_llm",
        "carryall_engine",
        "carryall_on_openvino",
        ",provider=openvino",
    ),
    Engine(
        "OpenVINO GenAI",
        "openvino",
        models.openvino_model,
        "ov_genai",
        "ov_engine",
        "openvino",
        starts="openvino",
    ),
    Engine("onnxruntime-genai", "genai", models.genai_model, "ort_genai", "genai_engine", "genai"),
    Engine("llama.cpp", "llama.cpp", models.llamacpp_model, "llamacpp", None, "llamacpp", starts="llamacpp"),
    Engine("vLLM", "vllm", models.vllm_model, "vllm_cpu", "vllm_engine", "vllm"),
)


def compare(folder: Path, model: str, engines: list[Engine], plan: measures.Plan, *, quantizing: bool) -> str:
    """Measure the engines on a model, write the results after each part and return the page."""
    file = models.file_of(model)
    if file is not None:
        engines = [engine for engine in engines if engine.starts is not None]
    contestants = [engine.enter(folder, model) for engine in engines]
    title = models.title(model)
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

    source = file or models.checkpoint(folder, model)
    roofline = plots.Roofline(source, contestants, plan, bandwidth * 1e9, peak)

    def keep(figures: Sequence[measures.Figure], versions: dict[str, str]) -> None:
        report.write(results, title, figures, versions, machine)
        plots.write_plots(results, title, figures, plan, roofline)

    figures, versions = measures.run(contestants, plan, keep)
    if file is not None:
        starts = {one.name: engine.starts for one, engine in zip(contestants, engines, strict=True)}
        figures += first_contacts(contestants, starts, plan.rounds)
    if quantizing:
        figures += quantizings(folder, model)
    if model == models.REAL:
        figures += fidelity(contestants, source, python_of(folder, "genai"))
    keep(figures, versions)
    return (results / f"{title}.md").read_text(encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [engine.name for engine in ENGINES]
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--model",
        action="append",
        type=models.model_name,
        metavar="MODEL",
        help=f"default: {', '.join(models.DEFAULT)}; or {', '.join(models.SHAPES)}, SHAPE:LAYERS, gguf:FILE",
    )
    parser.add_argument(
        "--engine", action="append", choices=names[1:], help="a peer of carryall; default: all"
    )
    parser.add_argument("--rounds", type=int, default=measures.Plan.rounds)
    parser.add_argument("--quick", action="store_true", help="short works, to see that all engines run")
    parser.add_argument(
        "--quantizing", action="store_true", help="time int4-fast and Q4_K_M of the same float weights"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    chosen = [e for e in ENGINES if not options.engine or e.name in (names[0], *options.engine)]
    plan = measures.QUICK if options.quick else measures.Plan(rounds=options.rounds)
    for model in options.model or models.DEFAULT:
        print(compare(options.folder.resolve(), model, chosen, plan, quantizing=options.quantizing))


if __name__ == "__main__":
    main()
