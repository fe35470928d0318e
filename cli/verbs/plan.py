"""``carryall plan``."""

from __future__ import annotations

import click

from ...options import TOKENS
from ...runtime.tasks.plan import MOST_BATCH, plan
from ..options import BYTES, amount, json_option, model_argument, quiet_option, rope_scaling_option
from ..progress import phases

_RATES = {f"{unit}/s" if unit else "": factor for unit, factor in BYTES.items()}


@click.command("plan")
@model_argument
@click.option(
    "--memory",
    callback=amount("size", BYTES, "16GB"),
    help="Memory of the machine, such as 16GB.  [default: of this machine]",
)
@click.option(
    "--bandwidth",
    callback=amount("size a second", {**BYTES, **_RATES}, "100GB/s"),
    help="Bandwidth of its memory, such as 100GB/s.  [default: this machine is measured]",
)
@click.option(
    "--context",
    callback=amount("number of tokens", TOKENS, "8k"),
    help="Tokens of a sequence, such as 8k.  [default: the model's own, at most 8192]",
)
@rope_scaling_option
@click.option(
    "--batch", type=click.IntRange(1, MOST_BATCH), default=1, show_default=True, help="Sequences at once."
)
@click.option(
    "--goal",
    type=click.Choice(["quality", "speed"]),
    default="quality",
    show_default=True,
    help="Take the most accurate quantized form that fits, or the one that decodes fastest.",
)
@json_option
@quiet_option
def command(
    model: str,
    memory: float | None,
    bandwidth: float | None,
    context: float | None,
    rope_scaling: str | None,
    batch: int,
    goal: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Show which form of a model fits into a machine, and how fast it will decode.

    Only headers are read, of a model on the hub too. For each form of the weights the table shows their size,
    keys and values, whether all sequences fit, and the tokens a second to expect with the whole context
    cached: from products of the kernels that are measured here, or with --bandwidth from the bytes of a step
    alone.

    \b
    Examples:
        carryall plan demo
        carryall plan ./qwen3-8b --memory 16GB --bandwidth 100GB/s --context 8k --batch 16
        carryall plan qwen3.5-9b
        carryall plan ./qwen3-8b --rope-scaling yarn:4 --context 128k
        carryall plan model.gguf --goal speed --json
    """
    with phases(quiet=quiet or as_json) as tell:
        report = plan(
            model,
            memory=None if memory is None else int(memory),
            bandwidth=bandwidth,
            context_length=None if context is None else int(context),
            rope_scaling=rope_scaling,
            batch=batch,
            goal="speed" if goal == "speed" else "quality",
            progress=tell,
        )
    click.echo(report.to_json() if as_json else str(report))
