"""``carryall export``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from ..exporter.export import export_package
from ..exporter.package import Package
from ..graph_opt.pipeline import run
from ..graph_opt.quantize.methods import METHODS, quantization
from ..runtime.errors import UsageError
from ..runtime.model_source import locate_model
from . import graph_facts
from .options import human_bytes, json_option, print_json, quiet_option
from .progress import progress


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
@json_option
@quiet_option
def command(source: str, out: Path, quantize: str, as_json: bool, quiet: bool) -> None:
    """Turn a Hugging Face checkpoint into a portable ONNX package.

    SRC is a checkpoint folder (config.json, *.safetensors, tokenizer.json), a hub id, or "demo". DST is the
    package, a new folder: model.onnx made of standard operators only, its weights, and the checkpoint's
    tokenizer and configuration. Weights are read, changed and written one by one, so that a model larger
    than the memory is no trouble. If anything fails, DST is not there.

    \b
    Examples:
        carryall export ./Qwen3-0.6B qwen3
        carryall export ./Qwen3-0.6B qwen3-int4 --quantize int4
    """
    path = locate_model(source)
    if path.is_file() or Package.is_package(path):
        raise UsageError(f"{source} is exported already; see 'carryall quantize' and 'carryall optimize'")
    chosen = None if quantize == "none" else quantization(quantize)
    start = time.perf_counter()
    with progress("export", quiet=quiet or as_json) as tell:
        package = export_package(
            path,
            out,
            transform=None if chosen is None else lambda model: run(model, [chosen.quantizer()])[0],
            quantization=None if chosen is None else chosen.record(),
            passes=() if chosen is None else (chosen.quantizer().name,),
            progress=tell,
        )
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
