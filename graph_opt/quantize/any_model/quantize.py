"""Quantize any float graph: one function per method, which returns a model and a report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ....errors import GraphError, UsageError
from ....progress import Progress as Progress
from ....records import dataclass
from ....storage.scratch import scratch_folder
from ...compare.sample_inputs import sample_inputs
from ...compare.tensors import Side
from ...graph.integer_sums import saturates
from ...graph.lazy import Array
from ...graph.map_types import map_names
from ...graph.onnx_files import read_onnx
from ...graph.saving import save_model
from ...passes.shape_inference import ShapeInferencePass
from ...pipeline.pipeline import run
from ...pipeline.pipelines import model_passes
from .dynamic import DynamicGraphPass
from .half_graph import HalfGraphPass, check_kernels, half_type, values_beyond
from .layers import find_layers
from .options import IntegerOptions, exempt
from .report import GraphQuantizationReport, OutputFidelity, output_fidelity
from .samples import Feed, Samples, generated_samples
from .search import StaticSearch
from .static import StaticGraphPass
from .tables import TablePass
from .twin import dynamic_errors
from .values import GraphValues

OLDEST = 13  # the first opset whose DequantizeLinear has per-axis scales


def prepare(model: ir.Model) -> ir.Model:
    """Optimize a float model; the results stay the same.

    Args:
        model: changed in place if its opset allows; use the returned model.

    Raises:
        UsageError: the model is already quantized, or has maps.
        GraphError: its opset is below 13, and it has operators that cannot be converted to a newer opset.
    """
    quantizers = (
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "MatMulInteger",
        "ConvInteger",
    )
    found = next((node for node in model.graph.all_nodes() if node.op_type in quantizers), None)
    if found is not None:
        raise UsageError(f"the model is already quantized (it has a {found.op_type}); use the float model")
    maps = map_names(model)
    if maps:
        raise UsageError(
            f"the model has maps ({maps[0]}), as classifiers return them; remove the operator that makes them"
        )
    model, report = run(model, model_passes())
    version = model.opset_imports.get("", OLDEST)
    if version < OLDEST:
        reasons = [
            refusal.reason for one in report.passes for refusal in one.refusals if one.name == "RaiseOpset"
        ]
        raise GraphError(
            f"{'; '.join(dict.fromkeys(reasons))}. Per-channel scales need opset {OLDEST}; export the model "
            f"again with opset {OLDEST} or later"
        )
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    ShapeInferencePass()(model)
    name_everything(model)
    return model


def name_everything(model: ir.Model) -> None:
    """Give every value a unique name, for reports."""
    common.NameFixPass()(model)


_TIMED = 7  # timed runs
_POOR = 15.0  # dB; below it, predictions change often
_NO_GAIN = 1.1  # ratio to the float model's time above which a warning is added
_FEW = 4  # from this many samples on, one in four is held out for measurement


def quantize_static(
    model: ir.Model,
    samples: Samples | None = None,
    options: IntegerOptions | None = None,
    *,
    progress: Progress | None = None,
) -> tuple[ir.Model, GraphQuantizationReport]:
    """Quantize Conv, Gemm and MatMul to int8 with calibrated ranges, in QDQ format.

    Args:
        model: a float graph; may be changed in place, use the returned model.
        samples: calibration samples; None generates random ones, with a warning.
        options: None for the defaults.
        progress: called after every sample that layers are measured on.

    Returns:
        The model, with the same inputs and outputs, and a report.

    Raises:
        UsageError: the model is already quantized, nothing in it can be quantized, or the samples do not
            match.
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
            report.notes.append(f"warning: no selection of layers reaches an SNR of {options.min_snr:g} dB")
        return _finished(source, best.quantizer, best.layer_errors, options)


def quantize_dynamic(
    model: ir.Model,
    samples: Samples | None = None,
    options: IntegerOptions | None = None,
    *,
    progress: Progress | None = None,
) -> tuple[ir.Model, GraphQuantizationReport]:
    """Quantize MatMul and Gemm, and optionally Conv, to int8 with ranges computed at every run.

    Args:
        model: a float graph; may be changed in place, use the returned model.
        samples: samples for measuring errors; None generates random ones, with a warning.
        options: None for the defaults.
        progress: called after every sample.

    Returns, raises:
        As ``quantize_static``.
    """
    options = options or IntegerOptions()
    with _prepared(model, samples, "int8-dynamic") as source:
        report, operators = source.report, {"Gemm", "MatMul", *(["Conv"] if options.convolutions else [])}
        layers, refused = find_layers(read_onnx(source.path).graphs())
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
    """Convert weights and computation to 16 bits; inputs and outputs stay float32.

    Args:
        model: a float graph; may be changed in place, use the returned model.
        method: "fp16" or "bf16".
        samples: values that overflow on them stay float32; None generates random ones, with a warning.

    Returns:
        The model and a report.

    Raises:
        UsageError: the model is already quantized, nothing can be converted, or the samples do not match.
        GraphError: the graph cannot run, or onnxruntime's CPU provider has no kernels for the type.
        MissingExtraError: onnxruntime is not installed.
    """
    dtype = half_type(method)
    with _prepared(model, samples, method) as source:
        report, path = source.report, source.path
        beyond = values_beyond(path, [*source.calibration, *source.held_out], dtype)
        result = read_onnx(path)
        converter = HalfGraphPass(dtype, keep_float=beyond)
        converter(result)
        if not converter.fired:
            raise UsageError(f"no operator of the model can be computed in {method}")
        hold_weights(result)
        check_kernels(result.clone(), method, path.parent)
        report.left_float = dict.fromkeys(beyond, f"it exceeds the range of {dtype.name} on the samples")
        reason = f"it holds numbers beyond the range of {dtype.name}"
        report.left_float |= dict.fromkeys(converter.wide_weights, reason)
        report.outputs = compare_outputs(path, result, source.held_out)
        _measure_time(source, result)
        report.bytes_after = weight_bytes(result)
        return result, report


@dataclass(frozen=True, slots=True)
class _Source:
    """The prepared float model, stored in a temporary folder during quantization.

    Attributes:
        path: its file.
        calibration: samples for calibration.
        held_out: samples for measuring the result.
        report: the report, filled step by step.
    """

    path: Path
    calibration: Sequence[Feed]
    held_out: Sequence[Feed]
    report: GraphQuantizationReport


@contextmanager
def _prepared(model: ir.Model, samples: Samples | None, method: str) -> Iterator[_Source]:
    before = weight_bytes(model)
    model = prepare(model)
    with scratch_folder() as folder:
        path = folder / "float.onnx"
        save_model(model, path)
        found = samples or _generated_samples(model.graph, path)
        calibration, held_out = _split(found.feeds)
        report = GraphQuantizationReport(method=method, samples=found.origin, bytes_before=before)
        if found.generated:
            report.notes.append(
                "warning: no samples were given; ranges and errors are those of random tensors"
            )
        yield _Source(path, calibration, held_out, report)


def _generated_samples(graph: ir.Graph, path: Path) -> Samples:
    """Return random samples with which the model runs, of other sizes than the usual ones if need be.

    Raises:
        UsageError: no random samples can be generated, or the model runs with none.
    """
    samples, side = generated_samples(graph), Side(path, "the model")
    try:
        side.run(samples.feeds[0])
    except GraphError:
        try:
            tried = sample_inputs(graph, side.run)
        except GraphError as error:
            raise UsageError(
                f"the model runs with none of the generated samples; give samples of your own: {error}"
            ) from error
        feeds = [sample.feed for sample in tried]
        return Samples(feeds, f"{len(feeds)} random samples", generated=True)
    return samples


def _finished(
    source: _Source,
    quantizer: StaticGraphPass | DynamicGraphPass,
    errors: Mapping[str, float],
    options: IntegerOptions,
) -> tuple[ir.Model, GraphQuantizationReport]:
    """Quantize layers and tables, and measure the result."""
    report, model, tables = source.report, read_onnx(source.path), TablePass(exclude=options.exclude)
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
    name_everything(model)  # what was written into bodies too
    hold_weights(model)
    report.outputs = compare_outputs(source.path, model, source.held_out)
    _measure_time(source, model)
    worst = report.worst_output
    if worst is not None and worst.snr < _POOR:
        report.notes.append(
            f"warning: an output differs much from the float one, SNR {worst.snr:.1f} dB; set min_snr, "
            "or use fp16"
        )
    if saturates() and quantizer.fired:
        report.notes.append(
            "on x86 processors without VNNI, onnxruntime by itself adds 8-bit products with saturation; "
            "carryall's sessions, by which the errors were measured, do not"
        )
    report.bytes_after = weight_bytes(model)
    return model, report


def _measure_time(source: _Source, model: ir.Model) -> None:
    """Measure the time of a run relative to the float model: minimum of 7 interleaved runs each."""
    names = [str(output.name) for output in model.graph.outputs]
    both = [
        GraphValues(loaded_graph, names, source.path.parent)
        for loaded_graph in (read_onnx(source.path), model.clone())
    ]
    fastest = [float("inf"), float("inf")]
    for _ in range(_TIMED):
        for index, loaded_graph in enumerate(both):
            start = time.perf_counter()
            loaded_graph.run(source.held_out[0])
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
    expected = GraphValues(read_onnx(exact), names, exact.parent)
    found = GraphValues(model.clone(), names, exact.parent)
    return output_fidelity([expected.run(feed) for feed in feeds], [found.run(feed) for feed in feeds])


def hold_weights(model: ir.Model) -> None:
    """Evaluate all lazy weights and load all mapped ones, before the temporary folder is deleted."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and tensor.dtype != ir.DataType.STRING:
                content: Array = np.array(tensor.numpy())
                value.const_value = ir.tensor(content, dtype=tensor.dtype, name=value.name)


def weight_bytes(model: ir.Model) -> int:
    """Return the bytes of all weights, including ``Constant`` nodes."""
    stored = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    nodes = [node for node in model.graph.all_nodes() if node.op_type == "Constant"]
    stored += [ir.convenience.get_const_tensor(node.outputs[0]) for node in nodes]
    return sum(one.nbytes for one in stored if one is not None and one.dtype != ir.DataType.STRING)


def _split(feeds: Sequence[Feed]) -> tuple[Sequence[Feed], Sequence[Feed]]:
    """Return samples for calibration and for measurement; the same ones if there are fewer than 4."""
    if len(feeds) < _FEW:
        return feeds, feeds
    last = _FEW - 1
    return [feed for number, feed in enumerate(feeds) if number % _FEW != last], feeds[last::_FEW]
