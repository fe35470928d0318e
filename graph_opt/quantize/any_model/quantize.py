"""Quantize any float graph: one function a method, a model in, a model and a report out."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ....errors import UsageError
from ....progress import Progress as Progress
from ...graph.lazy import Array
from .dynamic import DynamicGraphPass
from .half_graph import HalfGraphPass, check_kernels, half_type, values_beyond
from .layers import find_layers
from .options import IntegerOptions, exempt
from .prepare import prepare
from .report import GraphQuantizationReport, OutputFidelity, output_fidelity
from .samples import Feed, Samples, generated_samples
from .search import StaticSearch
from .static import StaticGraphPass
from .tables import TablePass
from .twin import dynamic_errors
from .values import GraphValues

_TIMED = 7  # runs
_POOR = 15.0  # decibels, below which answers change often
_NO_GAIN = 1.1  # times the float model's time
_FEW = 4  # samples; of more, one in four is measured on, not calibrated on


def quantize_static(
    model: ir.Model,
    samples: Samples | None = None,
    options: IntegerOptions | None = None,
    *,
    progress: Progress | None = None,
) -> tuple[ir.Model, GraphQuantizationReport]:
    """Compute Conv, Gemm and MatMul in 8-bit integers whose ranges are measured beforehand (Q/DQ form).

    Args:
        model: a float graph; may be changed in place, use the returned one.
        samples: to calibrate on; None makes some up, with a warning.
        options: None takes the defaults.
        progress: told about every sample that layers are measured on.

    Returns:
        The model, which has the same inputs and outputs, and what was done.

    Raises:
        UsageError: the model is quantized already, nothing in it can be, or the samples do not fit.
        GraphError: a value is NaN or infinite, or the graph cannot run.
        MissingExtraError: onnxruntime is not installed.
    """
    options = options or IntegerOptions()
    with _prepared(model, samples, "int8-static") as source:
        report = source.report
        search = StaticSearch(source.path, source.calibration, options, progress)
        best = search.best()
        report.calibrator, report.left_float = best.calibrator, best.left_float
        if not search.reaches_target(best):
            report.notes.append(f"warning: no choice of layers reaches an SNR of {options.min_snr:g} dB")
        return _finished(source, best.quantizer, best.layer_errors, options)


def quantize_dynamic(
    model: ir.Model,
    samples: Samples | None = None,
    options: IntegerOptions | None = None,
    *,
    progress: Progress | None = None,
) -> tuple[ir.Model, GraphQuantizationReport]:
    """Compute MatMul and Gemm, and Conv if asked, in 8-bit integers whose ranges are found at every run.

    Args:
        model: a float graph; may be changed in place, use the returned one.
        samples: to measure the errors of layers and outputs on; None makes some up, with a warning.
        options: None takes the defaults.
        progress: told about every sample.

    Returns, raises:
        As ``quantize_static``.
    """
    options = options or IntegerOptions()
    with _prepared(model, samples, "int8-dynamic") as source:
        report, operators = source.report, {"Gemm", "MatMul", *(["Conv"] if options.convolutions else [])}
        layers, refused = find_layers(ir.load(source.path).graphs())
        report.left_float = exempt(layers, refused, options, convolutions=options.convolutions)
        errors = {
            name: error.relative
            for name, error in dynamic_errors(
                source.path, source.calibration, operators, exclude=report.left_float, progress=progress
            ).items()
        }
        report.left_float |= options.vetoed(errors)
        kept = {name: error for name, error in errors.items() if name not in report.left_float}
        return _finished(
            source, DynamicGraphPass(exclude=report.left_float, operators=operators), kept, options
        )


def convert_half(
    model: ir.Model, method: str = "fp16", samples: Samples | None = None
) -> tuple[ir.Model, GraphQuantizationReport]:
    """Store weights and compute in 16 bits; inputs and outputs stay float32.

    Args:
        model: a float graph; may be changed in place, use the returned one.
        method: "fp16" or "bf16".
        samples: what overflows on them stays float32; None makes some up, with a warning.

    Raises:
        UsageError: the model is quantized already, or the samples do not fit.
        GraphError: a weight does not fit, the graph cannot run, or there are no kernels for the type.
        MissingExtraError: onnxruntime is not installed.
    """
    dtype = half_type(method)
    with _prepared(model, samples, method) as source:
        report, path = source.report, source.path
        beyond = values_beyond(path, [*source.calibration, *source.held_out], dtype)
        result = ir.load(path)
        converter = HalfGraphPass(dtype, keep_float=beyond)
        converter(result)
        if not converter.fired:
            raise UsageError(f"nothing in the model can be computed in {method}")
        hold_weights(result)
        check_kernels(result.clone(), method, path.parent)
        report.left_float = dict.fromkeys(beyond, f"it goes beyond {dtype.name} on the samples")
        report.left_float |= dict.fromkeys(converter.wide_weights, f"it holds numbers beyond {dtype.name}")
        report.outputs = compare_outputs(path, result, source.held_out)
        _measure_time(source, result)
        report.bytes_after = weight_bytes(result)
        return result, report


@dataclass(frozen=True, slots=True)
class _Source:
    """The prepared float model, which lies in a scratch folder while it is quantized.

    Attributes:
        path: its file.
        calibration: samples to calibrate on.
        held_out: samples to measure the result on.
        report: what is known so far.
        scratch: the folder.
    """

    path: Path
    calibration: Sequence[Feed]
    held_out: Sequence[Feed]
    report: GraphQuantizationReport
    scratch: tempfile.TemporaryDirectory[str]

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.scratch.cleanup()


def _prepared(model: ir.Model, samples: Samples | None, method: str) -> _Source:
    before = weight_bytes(model)
    model = prepare(model)
    found = samples or generated_samples(model.graph)
    calibration, held_out = _split(found.feeds)
    report = GraphQuantizationReport(method=method, samples=found.origin, bytes_before=before)
    if found.generated:
        report.notes.append("warning: no samples were given; ranges and errors are those of made-up tensors")
    scratch = tempfile.TemporaryDirectory(prefix="carryall-int8-")
    path = Path(scratch.name, "float.onnx")
    try:
        ir.save(model, path, external_data="float.onnx.data")
    except BaseException:
        scratch.cleanup()
        raise
    return _Source(path, calibration, held_out, report, scratch)


def _finished(
    source: _Source,
    quantizer: StaticGraphPass | DynamicGraphPass,
    errors: Mapping[str, float],
    options: IntegerOptions,
) -> tuple[ir.Model, GraphQuantizationReport]:
    """Quantize layers and tables, and measure the result."""
    report, model, tables = source.report, ir.load(source.path), TablePass(exclude=options.exclude)
    quantizer(model)
    before = set(model.graph.initializers)
    if options.tables:
        tables(model)
    report.tables = sorted(before - set(model.graph.initializers))
    if not quantizer.fired and not tables.fired:
        reasons = "; ".join(dict.fromkeys(report.left_float.values()))
        raise UsageError(
            "nothing in the model can be quantized: "
            f"{reasons or 'it has no Conv, Gemm or MatMul with a weight'}"
        )
    report.layer_errors = dict(errors)
    hold_weights(model)
    report.outputs = compare_outputs(source.path, model, source.held_out)
    _measure_time(source, model)
    worst = report.worst_output
    if worst is not None and worst.snr < _POOR:
        report.notes.append(
            f"warning: an output is far from the float one, SNR {worst.snr:.1f} dB; ask for more (min_snr), "
            "or take fp16"
        )
    report.bytes_after = weight_bytes(model)
    return model, report


def _measure_time(source: _Source, model: ir.Model) -> None:
    """Compare the time of runs, the fastest of a few in turn, and warn where nothing is gained."""
    names = [str(output.name) for output in model.graph.outputs]
    both = [GraphValues(one, names, source.path.parent) for one in (ir.load(source.path), model.clone())]
    fastest = [float("inf"), float("inf")]
    for _ in range(_TIMED):
        for index, one in enumerate(both):
            start = time.perf_counter()
            one.run(source.held_out[0])
            fastest[index] = min(fastest[index], time.perf_counter() - start)
    report = source.report
    report.time = fastest[1] / max(fastest[0], 1e-9)
    if report.time > _NO_GAIN:
        report.notes.append(
            f"warning: a run takes {report.time:.2f} times as long as the float model's on this CPU"
        )


def compare_outputs(exact: Path, model: ir.Model, feeds: Sequence[Feed]) -> dict[str, OutputFidelity]:
    """Compare a quantized model with the saved float one on samples."""
    names = [str(output.name) for output in model.graph.outputs]
    expected = GraphValues(ir.load(exact), names, exact.parent)
    found = GraphValues(model.clone(), names, exact.parent)
    return output_fidelity([expected.run(feed) for feed in feeds], [found.run(feed) for feed in feeds])


def hold_weights(model: ir.Model) -> None:
    """Compute all lazy weights and load all mapped ones, since the scratch folder goes away."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and tensor.dtype != ir.DataType.STRING:
                content: Array = np.array(tensor.numpy())
                value.const_value = ir.tensor(content, dtype=tensor.dtype, name=value.name)


def weight_bytes(model: ir.Model) -> int:
    """Return the bytes of all weights, those among ``Constant`` nodes included."""
    stored = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    nodes = [node for node in model.graph.all_nodes() if node.op_type == "Constant"]
    stored += [ir.convenience.get_const_tensor(node.outputs[0]) for node in nodes]
    return sum(one.nbytes for one in stored if one is not None and one.dtype != ir.DataType.STRING)


def _split(feeds: Sequence[Feed]) -> tuple[Sequence[Feed], Sequence[Feed]]:
    """Return samples to calibrate on and to measure on; the same ones where there are few."""
    if len(feeds) < _FEW:
        return feeds, feeds
    last = _FEW - 1
    return [feed for number, feed in enumerate(feeds) if number % _FEW != last], feeds[last::_FEW]
