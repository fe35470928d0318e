"""``carryall eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ...options import declared
from ...runtime.engine.config import EngineConfig
from ...runtime.tasks.evaluate import evaluate
from ..load_options import LORA_FIELDS, Chosen, config_options
from ..options import MOST_TOKENS, json_option, quiet_option, tell_notes
from ..progress import phases
from ..sections import SectionedCommand

# Evaluation uses the runner without an engine, so these options do not apply.
_NO_ENGINE = (
    *declared(EngineConfig),
    *("speculative", "num_speculative_tokens", "chat_template", "tool_prompt", *LORA_FIELDS),
)


@click.command("eval", cls=SectionedCommand)
@config_options(without=_NO_ENGINE)
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="Text to evaluate on, not part of the training data.  [default for the demo: its held-out text]",
)
@click.option(
    "--reference", metavar="MODEL", help="Compare with this model, such as the one before quantization."
)
@click.option(
    "--window",
    type=click.IntRange(2, MOST_TOKENS),
    help="Tokens of a window.  [default: the context length, at most 1024]",
)
@click.option(
    "--stride",
    type=click.IntRange(1, MOST_TOKENS),
    help="Distance between windows.  [default: half a window]",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1, MOST_TOKENS),
    help="Maximum number of tokens of the text.",
)
@click.option(
    "--prompts",
    type=click.IntRange(0, 4096),
    default=8,
    show_default=True,
    help="With --reference: number of prompts from the text whose greedy outputs are compared.",
)
@click.option(
    "--new-tokens",
    type=click.IntRange(1, MOST_TOKENS),
    default=32,
    show_default=True,
    help="Length of those outputs, in tokens.",
)
@click.option(
    "--as-stored",
    is_flag=True,
    help="Also measure the model as it is stored, with float activations; providers may round them to int8.",
)
@json_option
@quiet_option
def command(
    chosen: Chosen,
    text: Path | None,
    as_json: bool,
    quiet: bool,
    **measure: Any,
) -> None:
    """Measure perplexity, and the divergence from a reference model.

    Perplexity is exp of the mean negative log-likelihood per token; lower is better. The text is scored in
    overlapping windows, every token once. --reference adds the Kullback-Leibler divergence from the
    reference's predictions, the share of positions with the same most likely token, and the agreement of
    greedy outputs.

    \b
    Examples:
        carryall eval demo
        carryall eval qwen3-int4 --text wiki.txt --reference qwen3 --max-tokens 20000
    """
    with phases(quiet=quiet or as_json) as tell:
        found = evaluate(chosen.model, text, progress=tell, **measure)
    tell_notes(found.notes, quiet=quiet or as_json)
    click.echo(found.to_json() if as_json else str(found))
