"""``carryall quantize``."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import click
import onnx_ir as ir

from ..graph_opt.pipeline import run
from ..graph_opt.quantize.methods import METHODS, Quantization, quantization
from ..runtime.errors import UsageError
from ..runtime.model_source import locate_model
from . import graph_facts
from .models import load_graph
from .options import human_bytes, json_option, print_json, quiet_option
from .progress import progress
from .write_graph import write_graph


@click.command("quantize")
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--method",
    type=click.Choice(list(METHODS)),
    default="int4",
    show_default=True,
    help="What the weights become.",
)
@click.option(
    "--block-size", type=int, help="Weights that share a scale: 16 to 256; smaller is finer and larger."
)
@click.option(
    "--symmetric/--asymmetric", default=None, help="Without or with zero points.  [default: symmetric]"
)
@json_option
@quiet_option
def command(
    source: str,
    out: Path,
    method: str,
    block_size: int | None,
    symmetric: bool | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Make a model smaller and faster by storing its weights in few bits.

    IN is a package, a checkpoint, or an ONNX file; OUT is a new folder, or an ONNX file if it ends in .onnx.
    The result keeps to standard operators (DequantizeLinear in front of each MatMul) and runs everywhere.
    See what it costs with 'carryall verify IN OUT --max-kl 1', and what it brings with 'carryall bench OUT'.

    \b
    Example:
        carryall quantize qwen3 qwen3-int4 --method int4 --block-size 32
    """
    chosen = quantization(method, block_size=block_size, symmetric=symmetric)
    model, _ = load_graph(source)
    if "DequantizeLinear" in graph_facts.operators(model):
        raise UsageError(f"{source} is quantized already; start from the float model")
    facts = _quantize(model, chosen, source, out, quiet or as_json)
    if as_json:
        print_json(facts)
        return
    for refusal in facts["left_float"]:
        click.echo(f"left float: {refusal['reason']}")
    sizes = f"{human_bytes(facts['bytes_before'])} -> {human_bytes(facts['bytes_after'])}"
    click.echo(f"{out}: {facts['weights']} weights to {method}, {sizes}")


def _quantize(model: ir.Model, chosen: Quantization, source: str, out: Path, quiet: bool) -> dict[str, Any]:
    """Quantize and write; return what was done."""
    start = time.perf_counter()
    before = _weight_bytes(model)
    model, report = run(model, [chosen.quantizer()])
    names = tuple(one.name for one in report.passes)
    with progress("quantize", quiet=quiet) as tell:
        write_graph(
            model, locate_model(source), out, passes=names, quantization=chosen.record(), progress=tell
        )
    return {
        "path": str(out),
        "quantization": chosen.record(),
        "weights": report.passes[0].fired,
        "left_float": [dataclasses.asdict(refusal) for _, refusal in report.refusals],
        "bytes_before": before,
        "bytes_after": _weight_bytes(model),
        "seconds": round(time.perf_counter() - start, 3),
    }


def _weight_bytes(model: ir.Model) -> int:
    return sum(tensor.nbytes for tensor in graph_facts.initializers(model))
