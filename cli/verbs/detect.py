"""``carryall detect``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ...errors import UsageError
from ...runtime.tasks.detect import detect
from ...storage.texts import read_text
from ..options import json_option, model_argument, text_or_file
from ..sampling import READABLE


@click.command("detect")
@model_argument
@click.argument("file", type=READABLE)
@click.option(
    "--watermark",
    default="true",
    metavar="JSON|@FILE",
    help="The watermark that is looked for: true, or an object as in requests.",
)
@json_option
@click.pass_context
def command(ctx: click.Context, model: str, file: Path, watermark: str, as_json: bool) -> None:
    """Look for a watermark in the text of FILE, which a model wrote.

    MODEL is the model that may have written it: its tokenizer is used. The table shows how many tokens carry
    the signal, and the probability of so many by chance (the p-value). Exit code 0 if the watermark is
    found, 1 if it is not or the text is too short, 2 for wrong use.

    \b
    Examples:
        carryall detect demo answer.txt
        carryall detect demo answer.txt --watermark '{"kind": "synthid", "keys": [654, 400, 836]}'
    """
    try:
        wanted = json.loads(text_or_file(watermark, bare=True) or "null")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--watermark is not valid JSON: {error}") from error
    found = detect(model, read_text(file), watermark=wanted)
    click.echo(found.to_json() if as_json else str(found))
    ctx.exit(0 if found.marked else 1)
