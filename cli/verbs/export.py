"""``carryall export``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from ...graph_opt.quantize.methods import METHODS
from ...runtime.tasks.export import export
from ..options import json_option, quiet_option, rope_scaling_option
from ..progress import phases


@click.command("export")
@click.argument("source", metavar="SRC")
@click.argument("out", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--quantize",
    type=click.Choice(["none", *METHODS]),
    default="none",
    show_default=True,
    help="Quantization method of the weights; 'carryall quantize' has more settings.",
)
@click.option(
    "--via",
    type=click.Choice(["optimum"]),
    help="Trace the model with Optimum and torch, for families without an exporter.",
)
@click.option(
    "--adapter",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="A LoRA adapter of PEFT, merged into the weights.",
)
@click.option(
    "--layout",
    type=click.Choice(["carryall", "transformers.js"]),
    default="carryall",
    show_default=True,
    help="The files of DST: a package, or what transformers.js loads in browsers.",
)
@click.option(
    "--text-only", is_flag=True, help="Leave out what the model sees pictures with: smaller, for text."
)
@rope_scaling_option
@json_option
@quiet_option
def command(
    source: str,
    out: Path,
    quantize: str,
    via: Literal["optimum"] | None,
    adapter: Path | None,
    layout: Literal["carryall", "transformers.js"],
    text_only: bool,
    rope_scaling: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Convert a Hugging Face checkpoint to a portable ONNX package.

    SRC is a checkpoint folder (config.json, *.safetensors, tokenizer.json), a hub id, or "demo". DST is the
    package, a new folder: model.onnx with standard operators only, its weights, and the checkpoint's
    tokenizer and configuration. Weights are read, changed and written one by one, so the model may be larger
    than the memory. If the export fails, DST does not exist.

    \b
    Examples:
        carryall export ./Qwen3-0.6B qwen3
        carryall export ./Qwen3-0.6B qwen3-int4 --quantize int4
        carryall export ./some-new-model model --via optimum
        carryall export ./Qwen3-0.6B tuned --adapter ./my-lora
        carryall export ./Qwen3-0.6B long --rope-scaling yarn:4
        carryall export ./Qwen3-0.6B web --quantize int4 --layout transformers.js
    """
    method = None if quantize == "none" else quantize
    with phases(quiet=quiet or as_json) as tell:
        result = export(
            source,
            out,
            quantize=method,
            via=via,
            adapter=adapter,
            layout=layout,
            text_only=text_only,
            rope_scaling=rope_scaling,
            progress=tell,
        )
    click.echo(result.to_json() if as_json else str(result))
