"""``carryall verify``."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
from tokenizers import Tokenizer

from ...errors import UsageError
from ...exporter.package import TOKENIZER_FILE
from ...graph_opt.compare.bars import MAX_ERROR, MAX_KL_FLOAT, MAX_KL_ROUNDED, Bars
from ...graph_opt.compare.verify import verify
from ...runtime.models.model_source import locate_model
from ..integrity import check_integrity
from ..models import graph_file, stated_context
from ..options import json_option
from ..progress import progress

inputs_option = click.option(
    "--inputs",
    type=click.Path(path_type=Path, exists=True),
    help="Tensors to compare on, by input name: an .npz file, or a folder of them. For decoders, input_ids "
    "is enough. Default: made up from what the graph says of its inputs.",
)
max_kl_option = click.option(
    "--max-kl",
    type=float,
    help="The bar of decoders: largest KL divergence, in nats. "
    f"[default: {MAX_KL_FLOAT:g}; {MAX_KL_ROUNDED:g} if a graph rounds its activations]",
)
max_error_option = click.option(
    "--max-error",
    type=float,
    help="The bar of float outputs: largest error, relative to the range of the reference's values. "
    f"[default: {MAX_ERROR:g}; more for 16 bits]",
)
max_mismatch_option = click.option(
    "--max-mismatch",
    default=0.0,
    show_default=True,
    help="The bar of integer, boolean and string outputs: share of the elements that may differ.",
)


@click.command("verify")
@click.argument("a")
@click.argument("b", required=False)
@click.option("--prompt", help="Text to compare on, by A's tokenizer. Default: random tokens.")
@inputs_option
@click.option(
    "--steps", default=16, show_default=True, type=click.IntRange(1), help="Tokens after the prompt."
)
@max_kl_option
@max_error_option
@max_mismatch_option
@click.option(
    "--integrity",
    is_flag=True,
    help="Read every file of the package A, and compare it with what was recorded.",
)
@json_option
def command(
    a: str,
    b: str | None,
    prompt: str | None,
    inputs: Path | None,
    steps: int,
    max_kl: float | None,
    max_error: float | None,
    max_mismatch: float,
    integrity: bool,
    as_json: bool,
) -> None:
    """Check that two models give the same results, or that a package is whole.

    A and B run on the same inputs, on the CPU. Decoders run on tokens: a prompt with A's greedy continuation,
    a sequence in pieces, a padded batch, and a long KV cache; one may be portable and the other lowered.
    Their next-token distributions must stay within --max-kl. Where both compute in float32 and --max-kl is
    not given, logits and caches must stay within --max-error too. Other graphs run on several made-up inputs,
    or on those of --inputs, and each of their outputs must stay within its bar.

    A quantized model differs from its float original by design: give such a pair a wider bar.

    Exit code 0 if B is within the bars; 1 if it is not, or if a model cannot be read or run; 2 for wrong use.

    \b
    Examples:
        carryall verify demo demo-cpu
        carryall verify demo demo-int4 --max-kl 0.5 --prompt "def main():"
        carryall verify net.onnx net-small.onnx --inputs batch.npz
        carryall verify my-package --integrity
    """
    if integrity:
        if b is not None:
            raise UsageError("--integrity is about one package; leave B out")
        check_integrity(a, as_json=as_json)
        return
    if b is None:
        raise click.UsageError(
            "missing argument 'B': the model to compare with A", click.get_current_context()
        )
    if prompt is not None and inputs is not None:
        raise UsageError("--prompt and --inputs exclude each other")
    prompts = None if prompt is None else [_tokenize(locate_model(a), prompt)]
    bars = Bars(max_kl=max_kl, max_error=max_error, max_mismatch=max_mismatch)
    with tempfile.TemporaryDirectory() as scratch, progress("verify", quiet=as_json) as tell:
        files = graph_file(a, Path(scratch, "a")), graph_file(b, Path(scratch, "b"))
        found = verify(
            *files,
            inputs,
            bars,
            prompts=prompts,
            steps=steps,
            context_length=stated_context(a, b),
            names=(a, b),
            progress=tell,
        )
    click.echo(found.to_json() if as_json else found.text())
    found.check()


def _tokenize(model: Path, text: str) -> list[int]:
    path = model / TOKENIZER_FILE
    if not path.is_file():
        raise UsageError(
            f"--prompt needs a tokenizer, and {model} has none; leave --prompt out for random tokens"
        )
    tokens: list[int] = Tokenizer.from_file(str(path)).encode(text).ids
    if not tokens:
        raise UsageError("--prompt is empty")
    return tokens
