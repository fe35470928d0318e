"""``carryall bench``."""

from __future__ import annotations

import math

import click

from ...runtime.tasks.benchmark import MOST_REPEATS, benchmark
from ..load_options import LORA_FIELDS, Chosen, config_options
from ..options import json_option, quiet_option, tell_notes
from ..printing.bench import show
from ..progress import phases
from ..sections import SectionedCommand


def _batch_sizes(ctx: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    parts = value.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"'{value}' is not a list of batch sizes such as 1,8")
    return [int(part) for part in parts]


@click.command("bench", cls=SectionedCommand)
@config_options(
    without=("max_slots", "max_queue", "max_queued_tokens", "chat_template", "tool_prompt", *LORA_FIELDS),
    prefix_cache=False,
    max_step_slowdown=math.inf,
)
@click.option(
    "--batch", callback=_batch_sizes, default="1,8", show_default=True, help="Batch sizes to measure."
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Length of each prompt.",
)
@click.option(
    "--new-tokens",
    type=click.IntRange(2),
    default=64,
    show_default=True,
    help="Tokens generated for each prompt.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1, MOST_REPEATS),
    default=5,
    show_default=True,
    help="Timed runs, after a warm-up.",
)
@json_option
@quiet_option
def command(
    chosen: Chosen,
    batch: list[int],
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure the prefill and decode speed of a model.

    Random prompts run in the engine that serves requests. Prefill is the speed of prompt tokens, decode that
    of generated tokens. Each decode step reads all weights and the KV cache, so memory bandwidth limits it:
    the last column is the share of the measured bandwidth. Figures are medians, with minimum and maximum in
    brackets.

    \b
    Examples:
        carryall bench demo
        carryall bench qwen3 --batch 1,8,32 --prompt-tokens 512 --json
        carryall bench qwen3 --provider openvino --provider-option inference_precision=auto
    """
    with phases(quiet=quiet or as_json) as tell:
        report = benchmark(
            chosen.model,
            engine_config=chosen.engine,
            batch=batch,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            repeats=repeats,
            progress=tell,
        )
    tell_notes(report.notes, quiet=quiet or as_json)
    if as_json and report.results:
        click.echo(report.to_json())
    elif report.results:
        show(report.to_dict())
    report.check()
