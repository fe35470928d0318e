"""``carryall verify``."""

from __future__ import annotations

from pathlib import Path

import click

from ...errors import UsageError
from ...graph_opt.compare.bars import Bars
from ...runtime.tasks.verify import MOST_STEPS, verify
from ..integrity import check_integrity
from ..options import json_option
from ..progress import phases
from ..verify_options import bars_options, inputs_option


@click.command("verify")
@click.argument("a")
@click.argument("b", required=False)
@click.option("--prompt", help="Text to compare on, tokenized with A's tokenizer. Default: random tokens.")
@inputs_option
@click.option(
    "--steps",
    default=16,
    show_default=True,
    type=click.IntRange(1, MOST_STEPS),
    help="Number of greedy tokens after the prompt.",
)
@bars_options
@click.option(
    "--integrity",
    is_flag=True,
    help="Read all files of the package A, and compare them with its record.",
)
@json_option
def command(
    a: str,
    b: str | None,
    prompt: str | None,
    inputs: Path | None,
    steps: int,
    bars: Bars,
    integrity: bool,
    as_json: bool,
) -> None:
    """Compare two models, or check the files of a package.

    A and B run on the same inputs, on the CPU. Decoders run on tokens: a prompt with A's greedy output, a
    sequence in pieces, a padded batch, and a long KV cache; one may be portable and the other lowered. Their
    next-token distributions must stay within --max-kl. If both compute in float32 and --max-kl is not given,
    logits and caches must stay within --max-error too. Other graphs run on several generated inputs, or on
    those of --inputs, and each output must stay within its bar (tolerance).

    A quantized model differs from its float original by design: set a larger bar for such a pair.

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
            raise UsageError("--integrity checks one package; omit B")
        check_integrity(a, as_json=as_json)
        return
    if b is None:
        raise click.UsageError(
            "missing argument 'B': the model to compare with A", click.get_current_context()
        )
    with phases(quiet=as_json) as tell:
        found = verify(a, b, prompt=prompt, inputs=inputs, steps=steps, bars=bars, progress=tell)
    click.echo(found.to_json() if as_json else str(found))
    found.check()
