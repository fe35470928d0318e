"""``carryall bench``."""

from __future__ import annotations

import math
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...runtime.tasks.benchmark import MOST_REPEATS, benchmark
from ..load_options import LORA_FIELDS, Chosen, config_options
from ..options import human_bytes, json_option, quiet_option, tell_notes
from ..progress import phases
from ..sections import SectionedCommand


def show(document: dict[str, Any]) -> None:
    """Print the report of a benchmark as a table."""
    first = document["results"][0]
    where = f"{document['provider']}, {document['threads']} threads, {document['cpu']}"
    table = Table(
        "batch",
        "prefill tokens/s",
        "first token ms",
        "decode tokens/s",
        "of bandwidth",
        box=None,
        pad_edge=False,
    )
    for result in document["results"]:
        names = ("prefill_tokens_per_second", "time_to_first_token_ms", "decode_tokens_per_second")
        share = f"{100 * result['memory_bandwidth_share']:.0f} %"
        table.add_row(str(result["batch"]), *(_with_range(result[name]) for name in names), share)
    footer = [
        f"a step reads {human_bytes(document['weight_bytes_per_step'])} of weights",
        f"memory bandwidth {document['memory_bandwidth_gb_s']:.0f} GB/s",
        f"loaded in {document['load_seconds']:.2f} s",
    ]
    if document["peak_memory_bytes"] is not None:
        footer.append(f"peak memory {human_bytes(document['peak_memory_bytes'])}")
    console = Console(highlight=False)
    console.print(f"{document['model']} on {where}", markup=False)
    console.print(f"{first['prompt_tokens']} prompt tokens, {first['new_tokens']} new tokens\n")
    console.print(table)
    console.print("\n" + "; ".join(footer))


def _with_range(values: dict[str, float]) -> Text:
    digits = 0 if values["median"] >= 100 else 1
    median, low, high = (f"{values[key]:.{digits}f}" for key in ("median", "min", "max"))
    return Text(median) + Text(f" [{low}-{high}]", style="dim")


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
