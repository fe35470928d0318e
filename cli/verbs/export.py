"""``carryall export``."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import click

from ...errors import UsageError
from ...exporter.export import export_package
from ...exporter.optimum import trace
from ...exporter.package import Package, check_paths, check_tokenizer, write_package
from ...graph_opt.graph import graph_facts
from ...graph_opt.pipeline.pipeline import run
from ...graph_opt.pipeline.pipelines import portable_passes
from ...graph_opt.quantize.methods import METHODS, quantization
from ...runtime.models.model_source import locate_model
from ..options import human_bytes, json_option, print_json, quiet_option
from ..progress import progress


@click.command("export")
@click.argument("source", metavar="SRC")
@click.argument("out", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--quantize",
    type=click.Choice(["none", *METHODS]),
    default="none",
    show_default=True,
    help="How to store the weights; 'carryall quantize' has more settings.",
)
@click.option(
    "--via",
    type=click.Choice(["optimum"]),
    help="Let Optimum trace the model with torch, for families without an exporter of their own.",
)
@json_option
@quiet_option
def command(source: str, out: Path, quantize: str, via: str | None, as_json: bool, quiet: bool) -> None:
    """Turn a Hugging Face checkpoint into a portable ONNX package.

    SRC is a checkpoint folder (config.json, *.safetensors, tokenizer.json), a hub id, or "demo". DST is the
    package, a new folder: model.onnx made of standard operators only, its weights, and the checkpoint's
    tokenizer and configuration. Weights are read, changed and written one by one, so that a model larger
    than the memory is no trouble. If anything fails, DST is not there.

    \b
    Examples:
        carryall export ./Qwen3-0.6B qwen3
        carryall export ./Qwen3-0.6B qwen3-int4 --quantize int4
        carryall export ./some-new-model model --via optimum
    """
    path = locate_model(source)
    if path.is_file() or Package.is_package(path):
        raise UsageError(f"{source} is exported already; see 'carryall quantize' and 'carryall optimize'")
    chosen = None if quantize == "none" else quantization(quantize)
    passes = [] if chosen is None else [chosen.quantizer()]
    record = None if chosen is None else chosen.record()
    start = time.perf_counter()
    with progress("export", quiet=quiet or as_json) as tell:
        if via is None:
            package = export_package(
                path,
                out,
                transform=lambda model: run(model, passes)[0],
                quantization=record,
                passes=tuple(one.name for one in passes),
                progress=tell,
            )
        else:
            check_paths(path, out)
            check_tokenizer(path)
            with tempfile.TemporaryDirectory() as folder:
                model, report = run(trace(path, Path(folder)), [*portable_passes(), *passes])
                names = [one.name for one in report.passes]
                package = write_package(model, path, out, quantization=record, passes=names, progress=tell)
    show_package(package, time.perf_counter() - start, as_json=as_json)


def show_package(package: Package, seconds: float, *, as_json: bool) -> None:
    """Print what was written."""
    model = package.load()
    size = sum(path.stat().st_size for path in package.path.iterdir())
    facts: dict[str, Any] = {
        "path": str(package.path),
        "model_type": package.record.model_type,
        "parameters": graph_facts.parameter_count(model),
        "nodes": sum(graph_facts.operators(model).values()),
        "quantization": package.record.quantization,
        "bytes": size,
        "seconds": round(seconds, 3),
    }
    if as_json:
        print_json(facts)
        return
    method = package.record.quantization["method"] if package.record.quantization else "float32"
    parameters = f"{facts['parameters'] / 1e6:,.1f} M parameters, {method}"
    click.echo(
        f"{package.path}: {package.record.model_type}, {parameters}, {human_bytes(size)}, {seconds:.1f} s"
    )
