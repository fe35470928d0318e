"""``carryall quantize``."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import onnx_ir as ir

from ...errors import UsageError
from ...graph_opt.graph import graph_facts
from ...graph_opt.passes.base import GraphPass
from ...graph_opt.pipeline.pipeline import run
from ...graph_opt.pipeline.report import Report
from ...graph_opt.quantize.algorithms.smooth import SmoothQuantPass
from ...graph_opt.quantize.calibration.activations import MIN_TOKENS
from ...graph_opt.quantize.calibration.calibrators import CALIBRATOR, CALIBRATORS
from ...graph_opt.quantize.formats.half import is_half
from ...graph_opt.quantize.formats.kv_cache import KV_FORMATS, has_quantized_kv
from ...graph_opt.quantize.formats.weight_only import has_quantized_weights
from ...graph_opt.quantize.methods import ALGORITHMS, EMBEDDINGS, METHODS, Quantization, quantization
from ...graph_opt.quantize.search.sensitivity import dynamic_rounding, static_rounding
from ...runtime.evaluate.calibration import MAX_TOKENS
from ...runtime.models.model_source import locate_model
from ..calibration import LAYER_TOKENS, Calibration
from ..models import load_graph
from ..options import human_bytes, json_option, print_json, quiet_option
from ..progress import progress
from ..quantize_report import check_measurable, measure_price, summary
from ..report_file import check_report, write_report
from ..write_graph import write_graph

NO_METHOD = "none"


@click.command("quantize")
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--method",
    type=click.Choice([*METHODS, NO_METHOD]),
    default="int4",
    show_default=True,
    help="What the weights become.",
)
@click.option(
    "--block-size", type=int, help="Weights that share a scale: 16 to 256; smaller is finer and larger."
)
@click.option(
    "--symmetric/--asymmetric",
    default=None,
    help="Without or with zero points.  [default: with --algorithm rtn without, else with]",
)
@click.option(
    "--algorithm",
    type=click.Choice(list(ALGORITHMS)),
    default="rtn",
    show_default=True,
    help="How weights are rounded. rtn: to the nearest. hqq, kquant: better ranges. awq, gptq: so that the "
    "layers' products on a calibration text change least; they take minutes.",
)
@click.option(
    "--embedding",
    type=click.Choice(list(EMBEDDINGS)),
    help="What the embedding, and a head tied to it, becomes.  [default: with --algorithm rtn as the other "
    "weights, else int8]",
)
@click.option(
    "--budget",
    metavar="BITS",
    help="With int4, int8: mean bits a weight, scales included, such as 4.5bits. Some layers get more.",
)
@click.option(
    "--max-kl",
    type=click.FloatRange(0, min_open=True),
    help="With int4, int8: the smallest mix of int4, int8 and float layers whose divergence stays below.",
)
@click.option(
    "--smooth",
    is_flag=True,
    help="With int8-dynamic, int8-static: move large activation channels into the weights (SmoothQuant).",
)
@click.option(
    "--max-error",
    type=click.FloatRange(0, 1),
    help="With int8-dynamic, int8-static: layers off by more than this share, such as 0.05, keep float "
    "activations.",
)
@click.option(
    "--calibrator",
    type=click.Choice(list(CALIBRATORS)),
    help=f"With int8-static: how the ranges of activations are chosen.  [default: {CALIBRATOR}]",
)
@click.option(
    "--kv",
    type=click.Choice(list(KV_FORMATS)),
    help="Keep the KV cache in 8 bits, calibrated on a text: one scale a channel, or one a tensor.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Text, or .jsonl of prompts, to calibrate on.  [default: one that comes along]",
)
@click.option(
    "--calibration-tokens",
    type=click.IntRange(MIN_TOKENS),
    help=f"How many tokens of the text are read.  [default: {MAX_TOKENS}; awq and gptq {LAYER_TOKENS}]",
)
@click.option(
    "--report",
    "report_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Measure what it costs and brings: a page if it ends in .html, else JSON.",
)
@json_option
@quiet_option
def command(
    source: str,
    out: Path,
    method: str,
    block_size: int | None,
    symmetric: bool | None,
    algorithm: str,
    embedding: str | None,
    budget: str | None,
    max_kl: float | None,
    smooth: bool,
    max_error: float | None,
    calibrator: str | None,
    kv: str | None,
    calibration: Path | None,
    calibration_tokens: int | None,
    report_file: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Make a model smaller and faster by storing its weights, and its KV cache, in few bits.

    IN is a package, a checkpoint, or an ONNX file; OUT is a new folder, or an ONNX file if it ends in .onnx.
    The result keeps to standard operators (QuantizeLinear and DequantizeLinear) and runs everywhere.
    --report shows what it costs and brings: the error of every layer, predictions compared with IN's, size
    and speed before and after. 'carryall eval OUT --text FILE --reference IN' takes a text of your own.

    \b
    Examples:
        carryall quantize qwen3 qwen3-int4 --method int4 --block-size 32
        carryall quantize qwen3 qwen3-int4 --algorithm gptq --kv int8 --calibration prompts.jsonl
        carryall quantize qwen3 qwen3-mixed --algorithm gptq --max-kl 0.02
        carryall quantize qwen3 qwen3-int8 --method int8-dynamic --smooth
        carryall quantize qwen3 qwen3-int8 --method int8-static --smooth --calibration prompts.jsonl
        carryall quantize qwen3 qwen3-fp16 --method fp16 --report price.html
    """
    start = time.perf_counter()
    chosen = None
    if method != NO_METHOD:
        chosen = quantization(
            method, block_size=block_size, symmetric=symmetric, algorithm=algorithm, embedding=embedding
        )
    wanted = Wanted(chosen, kv, smooth, max_error, calibrator, bits_of(budget), max_kl)
    wanted.check(calibration, calibration_tokens)
    check_report(report_file)
    if report_file is not None:
        check_measurable(source)
    model, package = load_graph(source)
    _check(model, source, chosen, kv)
    silent = quiet or as_json
    with tempfile.TemporaryDirectory() as scratch:
        measured = Calibration(
            source, model, calibration, Path(scratch), tokens=calibration_tokens, quiet=silent
        )
        passes, record = wanted.passes(measured)
        before = (package.record.quantization if package is not None else None) or {}
        facts, report = _quantize(model, passes, {**before, **record}, source, out, silent)
        facts["seconds"] = round(time.perf_counter() - start, 3)
        if report_file is not None:
            facts |= measure_price(source, out, passes, measured, Path(scratch), silent)
            report.facts |= {"source": source, "target": str(out), **facts}
            write_report(report, report_file)
    _report(facts, method, kv, as_json)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the options ask for."""

    chosen: Quantization | None
    kv: str | None
    smooth: bool
    max_error: float | None
    calibrator: str | None
    budget: float | None
    max_kl: float | None

    def check(self, calibration: Path | None, calibration_tokens: int | None) -> None:
        """Refuse options that would have no effect."""
        chosen, about_activations = self.chosen, self.smooth or self.max_error is not None
        if chosen is None and self.kv is None:
            raise UsageError("nothing to do: choose a --method, or --kv int8")
        if about_activations and (chosen is None or not chosen.computes_in_integers):
            raise UsageError(
                "--smooth and --max-error are for a --method that quantizes activations: "
                "int8-dynamic, int8-static"
            )
        mixing = self.budget is not None or self.max_kl is not None
        if mixing and (chosen is None or not chosen.weight_only):
            raise UsageError("--budget and --max-kl are for --method int4 and int8")
        if self.budget is not None and self.max_kl is not None:
            raise UsageError("--budget and --max-kl may contradict each other; choose one of them")
        measuring = mixing or (chosen is not None and (chosen.needs_calibration or chosen.needs_ranges))
        if self.calibrator is not None and (chosen is None or not chosen.needs_ranges):
            raise UsageError("--calibrator is for --method int8-static")
        given = calibration is not None or calibration_tokens is not None
        if given and not (self.kv or about_activations or measuring):
            raise UsageError(
                "--calibration is for --kv, --method int8-static, --algorithm awq and gptq, --budget, "
                "--max-kl, --smooth and --max-error; nothing else needs a text"
            )

    def passes(self, measured: Calibration) -> tuple[list[GraphPass], dict[str, Any]]:
        """Return what does it, in order, and what a package's record says about it."""
        passes: list[GraphPass] = []
        record: dict[str, Any] = {}
        if self.kv is not None:
            passes.append(measured.kv_pass(per_tensor=KV_FORMATS[self.kv]))
            record["kv_cache"] = self.kv
        if self.chosen is not None:
            passes += self._method(self.chosen, measured, record)
        return passes, record

    def _method(self, chosen: Quantization, measured: Calibration, record: dict[str, Any]) -> list[GraphPass]:
        """Measure what the method needs; add to ``record`` what it does."""
        passes: list[GraphPass] = []
        factors = measured.smoothing() if self.smooth else {}
        if self.smooth:
            passes.append(SmoothQuantPass(factors))
            record["smooth"] = True
        ranges: dict[str, float] | None = None
        if chosen.needs_ranges:
            record["calibrator"] = self.calibrator or CALIBRATOR
            ranges = measured.ranges(record["calibrator"], factors)
        exempt: Collection[str] = ()
        if chosen.half_type is not None:
            exempt = measured.beyond(chosen.half_type)
        elif self.max_error is not None:
            rounding = dynamic_rounding if ranges is None else static_rounding(ranges)
            exempt, left = measured.sensitive_layers(self.max_error, rounding, factors, chosen.form)
            chosen = dataclasses.replace(chosen, overrides={**chosen.overrides, **dict.fromkeys(left)})
        if self.budget is not None or self.max_kl is not None:
            plan = measured.plan(chosen, self.budget, self.max_kl)
            chosen = dataclasses.replace(chosen, overrides=plan.overrides)
            record["mixed"] = plan.record()
        layers = measured.layers(chosen) if chosen.needs_calibration else None
        if layers is not None and layers.factors:
            passes.append(SmoothQuantPass(layers.factors))
        record |= chosen.record()
        if exempt:
            record["weight_only" if chosen.half_type is None else "float"] = sorted(exempt)
        return [*passes, chosen.quantizer(layers, ranges=ranges, exclude=exempt)]


def bits_of(budget: str | None) -> float | None:
    """Return the number in ``4.5bits`` or ``4.5``.

    Raises:
        UsageError: it is none, or not positive.
    """
    if budget is None:
        return None
    try:
        bits = float(budget.removesuffix("bits").removesuffix("bit"))
    except ValueError as error:
        raise UsageError(f"a budget is a number of bits, such as 4.5bits, not '{budget}'") from error
    if not 0 < bits <= 32:
        raise UsageError(f"a budget is more than 0 and at most 32 bits, not '{budget}'")
    return bits


def _check(model: ir.Model, source: str, chosen: Quantization | None, kv: str | None) -> None:
    """Refuse to quantize twice."""
    if chosen is not None and has_quantized_weights(model.graph):
        raise UsageError(f"{source} is quantized already; start from the float model")
    if is_half(model.graph):
        raise UsageError(f"{source} is in 16 bits already; start from the float model")
    if kv is not None and has_quantized_kv(model.graph):
        raise UsageError(f"the KV cache of {source} is quantized already; start from the float model")


def _quantize(
    model: ir.Model, passes: list[GraphPass], record: dict[str, Any], source: str, out: Path, quiet: bool
) -> tuple[dict[str, Any], Report]:
    """Quantize and write; return what was done, and what each pass did."""
    before = _weight_bytes(model)
    model, report = run(model, passes)
    names = tuple(one.name for one in report.passes)
    with progress("quantize", quiet=quiet) as tell:
        write_graph(model, locate_model(source), out, passes=names, quantization=record, progress=tell)
    fired = {one.name: one.fired for one in report.passes}
    facts = {
        "path": str(out),
        "quantization": record,
        "weights": 0 if "method" not in record else report.passes[-1].fired,
        "kv_layers": fired.get("QuantizeKV", 0),
        "left_float": [dataclasses.asdict(refusal) for _, refusal in report.refusals],
        "bytes_before": before,
        "bytes_after": _weight_bytes(model),
    }
    return facts, report


def _report(facts: dict[str, Any], method: str, kv: str | None, as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    for reason in dict.fromkeys(refusal["reason"] for refusal in facts["left_float"]):
        click.echo(f"left float: {reason}")
    done = [] if method == NO_METHOD else [f"{facts['weights']} weights to {method}"]
    kept = facts["quantization"].get("weight_only", [])
    done += [f"{len(kept)} of them with float activations"] if kept else []
    done += [] if kv is None else [f"KV cache of {facts['kv_layers']} layers to {kv}"]
    sizes = f"{human_bytes(facts['bytes_before'])} -> {human_bytes(facts['bytes_after'])}"
    click.echo(f"{facts['path']}: {', '.join(done)}, {sizes}")
    if "fidelity" in facts:
        click.echo(summary(facts))


def _weight_bytes(model: ir.Model) -> int:
    return sum(tensor.nbytes for tensor in graph_facts.initializers(model))
