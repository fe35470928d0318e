"""Quantize an ONNX file that is not a decoder, to INT8 or 16 bits."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...errors import UsageError
from ...graph_opt.compare.runners import is_decoder
from ...graph_opt.graph.load import read_model
from ...graph_opt.quantize.any_model.images import ImageOptions
from ...graph_opt.quantize.any_model.options import IntegerOptions
from ...graph_opt.quantize.any_model.quantize import convert_half, quantize_dynamic, quantize_static
from ...graph_opt.quantize.any_model.report import GraphQuantizationReport
from ...graph_opt.quantize.any_model.samples import (
    GeneratedSamplesWarning,
    Samples,
    checked_samples,
    read_samples,
)
from ...progress import Progress, phase
from ...reports import json_value
from ...storage.writing import write_whole
from ..models.model_source import locate_model
from ..models.write_graph import check_output, write_single_file
from ..types.arguments import checked_arguments
from .report_file import check_report, left_without_report

METHODS = ("int8-static", "int8-dynamic", "fp16", "bf16")


def is_any_model(source: str | Path, method: str) -> bool:
    """Whether a model is an ONNX file but not a decoder, and ``method`` applies to such models."""
    path = locate_model(source)
    return method in METHODS and path.is_file() and not is_decoder(read_model(path).graph)


@checked_arguments
def quantize_any(
    source: str | Path,
    out: str | Path,
    method: str = "int8-static",
    *,
    calibration: str | Path | Sequence[Mapping[str, Any]] | None = None,
    options: IntegerOptions | None = None,
    images: ImageOptions | None = None,
    report: str | Path | None = None,
    progress: Progress | None = None,
) -> GraphQuantizationReport:
    """Quantize one ONNX file into another.

    Args:
        source: an ONNX file.
        out: a new ONNX file.
        method: ``int8-static``, ``int8-dynamic``, ``fp16`` or ``bf16``.
        calibration: an .npz file of inputs, a folder of those or of images, or mappings from input names to
            arrays; made up by default.
        options: of the INT8 methods.
        images: how images become tensors.
        report: a JSON file for the report.
        progress: called in the phase ``measure``.

    Raises:
        UsageError: an option has no effect, the samples do not fit, or the result would be larger.
        OutputExistsError: ``out`` exists.
        GraphError: the model cannot be read or run.
    """
    start = time.perf_counter()
    path, out, file = locate_model(source), Path(out), None if report is None else Path(report)
    if method not in METHODS:
        raise UsageError(f"method '{method}' is not one of {', '.join(METHODS)}")
    if out.suffix != ".onnx":
        raise UsageError(f"{path} is an ONNX file, so the output must be one too: name it {out}.onnx")
    if file is not None and file.suffix != ".json":
        raise UsageError(f"the report of a model that is not a decoder is JSON: name it {file.stem}.json")
    if calibration is None and images is not None:
        raise UsageError("--image options have no effect without --calibration")
    check_report(file)
    check_output(path, out)
    model = read_model(path)
    samples = None if calibration is None else _samples(model, calibration, images)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GeneratedSamplesWarning)  # the report's notes contain it
        result, measured = _quantized(model, method, samples, options, phase(progress, "measure"))
    measured.bytes_before = _file_bytes(path)
    measured.bytes_after = write_single_file(result, out, at_most=measured.bytes_before)
    measured.path, measured.seconds = str(out), round(time.perf_counter() - start, 3)
    if file is not None:
        with left_without_report(out, file):
            write_whole(file, json.dumps(json_value(measured.to_dict()), indent=2, ensure_ascii=False))
    return measured


def _samples(
    model: ir.Model, calibration: str | Path | Sequence[Mapping[str, Any]], images: ImageOptions | None
) -> Samples:
    if isinstance(calibration, str | Path):
        return read_samples(model.graph, Path(calibration), images=images)
    return checked_samples(model.graph, calibration)


def _quantized(
    model: ir.Model,
    method: str,
    samples: Samples | None,
    options: IntegerOptions | None,
    progress: Progress,
) -> tuple[ir.Model, GraphQuantizationReport]:
    if method in ("fp16", "bf16"):
        if options is not None:
            raise UsageError(
                "--calibrator, --max-error, --min-snr, --exclude and --dynamic-conv are for int8, "
                f"not for {method}"
            )
        return convert_half(model, method, samples)
    run = quantize_static if method == "int8-static" else quantize_dynamic
    return run(model, samples, options or IntegerOptions(), progress=progress)


def _file_bytes(path: Path) -> int:
    model = read_model(path)
    tensors = [one.const_value for graph in model.graphs() for one in graph.initializers.values()]
    external = [one.nbytes for one in tensors if isinstance(one, ir.ExternalTensor)]
    return path.stat().st_size + sum(external)
