"""``carryall quantize``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ...graph_opt.quantize.recipe import QuantizationRecipe
from ...options import declared
from ...runtime.tasks.quantize import quantize
from ...runtime.tasks.quantize_any import is_any_model
from ..declared_options import declared_option, option_help
from ..options import json_option, quiet_option
from ..progress import phases
from ..quantize_any import any_model_options, check_unused, quantize_file

Command = Callable[..., Any]


def recipe_options(function: Command) -> Command:
    """Add an option for each field, and pass their values as one argument, ``settings``."""
    declarations = declared(QuantizationRecipe)

    @functools.wraps(function)
    def gather(**given: Any) -> Any:
        return function(settings={name: given.pop(name) for name in declarations}, **given)

    command: Command = gather
    for name, declaration in reversed([*declarations.items()]):
        shown = {"default": declaration.default, "show_default": declaration.default is not None}
        if name == "calibration":
            option = click.option(
                "--calibration", type=click.Path(exists=True), help=option_help(declaration)
            )
        else:
            option = declared_option(declaration, section="", **shown)
        command = option(command)
    return command


@click.command("quantize")
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@recipe_options
@any_model_options
@click.option(
    "--report",
    "report_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Measure quality and speed before and after: a page if it ends in .html, else JSON.",
)
@json_option
@quiet_option
def command(
    source: str,
    out: Path,
    settings: dict[str, Any],
    report_file: Path | None,
    as_json: bool,
    quiet: bool,
    **any_model: Any,
) -> None:
    """Quantize the weights of a model, and optionally its KV cache.

    IN is a package, a checkpoint, or an ONNX file; OUT is a new folder, or an ONNX file if it ends in .onnx.
    The result uses standard operators only (QuantizeLinear and DequantizeLinear) and runs everywhere.
    --report measures the error of every layer, the predictions compared with IN's, and size and speed before
    and after. 'carryall eval OUT --text FILE --reference IN' uses your own text.

    \b
    Examples:
        carryall quantize qwen3 qwen3-int4 --method int4 --block-size 32
        carryall quantize qwen3 qwen3-int4 --algorithm gptq --kv int8 --calibration prompts.jsonl
        carryall quantize qwen3 qwen3-mixed --algorithm gptq --max-kl 0.02
        carryall quantize qwen3 qwen3-int8 --method int8-dynamic --smooth
        carryall quantize qwen3 qwen3-int8 --method int8-static --smooth --calibration prompts.jsonl
        carryall quantize qwen3 qwen3-fp16 --method fp16 --report price.html
        carryall quantize detector.onnx small.onnx --method int8-static --calibration photos/ --image-std 0.5
    """
    with phases(quiet=quiet or as_json) as tell:
        if is_any_model(source, settings["method"]):
            quantize_file(
                source, out, settings, report=report_file, as_json=as_json, progress=tell, **any_model
            )
            return
        check_unused(any_model, settings["calibration"])
        found = quantize(source, out, QuantizationRecipe(**settings), report=report_file, progress=tell)
    click.echo(found.to_json() if as_json else str(found))
