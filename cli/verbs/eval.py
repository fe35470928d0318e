"""``carryall eval``."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from ...errors import UsageError
from ...options import declared
from ...providers.base import Runner
from ...runtime.engine.config import EngineConfig
from ...runtime.evaluate.calibration import read_text
from ...runtime.evaluate.evaluation import GreedyAgreement, Prediction, Tokens, compare_greedy, predict
from ...runtime.models.loading import LoadedModel
from ...runtime.models.model_source import locate_model
from ..generation import open_model
from ..load_options import Chosen, config_options
from ..options import json_option, print_json, quiet_option
from ..progress import progress
from ..sections import SectionedCommand

_PROMPT_TOKENS = 32
_LONGEST_WINDOW = 1024
HELD_OUT = "heldout.txt"
# Texts go through the runner itself: there is no engine, and nothing is proposed or chatted.
_NO_ENGINE = (*declared(EngineConfig), "speculative", "num_speculative_tokens", "chat_template")


@click.command("eval", cls=SectionedCommand)
@config_options(without=_NO_ENGINE)
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="Text to predict, best one the model never saw.  [default for the demo: its held-out text]",
)
@click.option(
    "--reference", metavar="MODEL", help="Compare with this model, such as the one before quantization."
)
@click.option(
    "--window", type=click.IntRange(2), help="Tokens seen at once.  [default: the context, at most 1024]"
)
@click.option("--stride", type=click.IntRange(1), help="Distance between windows.  [default: half a window]")
@click.option("--max-tokens", type=click.IntRange(1), help="Score no more than the first tokens of the text.")
@click.option(
    "--prompts",
    type=click.IntRange(0),
    default=8,
    show_default=True,
    help="With --reference: places of the text that both continue greedily.",
)
@click.option(
    "--new-tokens",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Length of those continuations.",
)
@json_option
@quiet_option
def command(
    chosen: Chosen,
    text: Path | None,
    reference: str | None,
    window: int | None,
    stride: int | None,
    max_tokens: int | None,
    prompts: int,
    new_tokens: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure how well a model predicts a text, and how near it is to a reference.

    Perplexity is e to the mean surprise a token, lower is better; the text is read in overlapping windows
    that score every token once. With --reference come the Kullback-Leibler divergence from its predictions,
    how often both find the same token likeliest, and how far their greedy continuations agree.

    \b
    Examples:
        carryall eval demo
        carryall eval qwen3-int4 --text wiki.txt --reference qwen3 --max-tokens 20000
    """
    model = str(chosen.model.model)
    content = read_text(text or _held_out(model, reference))
    slots, silent = max(1, prompts), quiet or as_json
    with contextlib.ExitStack() as stack:
        models = [chosen.model]
        if reference:
            models.append(
                dataclasses.replace(chosen.model, model=reference, quantize=None, kv_cache_dtype=None)
            )
        runners: list[Runner] = []
        tokens = np.empty(0, np.int64)
        for config in models:
            one = open_model(config, max_slots=slots, quiet=silent)
            stack.callback(one.runner.close)
            tokens = tokens if runners else _tokens(one, content)[:max_tokens]
            runners.append(one.runner)
        found = _predict(runners, tokens, window, stride, silent)
        greedy = greedy_agreement(runners, tokens, prompts, new_tokens)
    if as_json:
        print_json(_document(model, reference, found, greedy))
    else:
        _show(found, greedy)


def _predict(
    runners: list[Runner], tokens: Tokens, window: int | None, stride: int | None, quiet: bool
) -> Prediction:
    width = window or min(_LONGEST_WINDOW, *(runner.info.context_length for runner in runners))
    with progress("eval", quiet=quiet) as tell:
        return predict(
            runners[0],
            tokens,
            window=width,
            stride=stride or max(1, width // 2),
            reference=runners[1] if len(runners) > 1 else None,
            progress=tell,
        )


def greedy_agreement(
    runners: list[Runner], tokens: Tokens, prompts: int, new_tokens: int
) -> GreedyAgreement | None:
    """Let two models continue prompts from places spread evenly over a text; None with nothing to compare."""
    if len(runners) < 2 or not prompts:
        return None
    longest = min(runner.info.context_length for runner in runners)
    new_tokens = min(new_tokens, longest - 1)
    size = min(_PROMPT_TOKENS, longest - new_tokens, len(tokens))
    places = np.linspace(0, len(tokens) - size, prompts).astype(int)
    return compare_greedy(
        runners[0], runners[1], [tokens[place : place + size] for place in places], new_tokens
    )


def _held_out(*models: str | None) -> Path:
    """Return the text that lies beside a model, as the demo's does."""
    for name in models:
        path = None if name is None else locate_model(name) / HELD_OUT
        if path is not None and path.is_file():
            return path
    raise UsageError("give a text to predict: --text FILE")


def _tokens(model: LoadedModel, text: str) -> Tokens:
    if model.tokenizer is None:
        raise UsageError(f"{model.name} has no tokenizer; evaluate a package or checkpoint")
    return np.array(model.tokenizer.encode(text), np.int64)


def _document(
    model: str, reference: str | None, found: Prediction, greedy: GreedyAgreement | None
) -> dict[str, Any]:
    facts = {"model": model, "reference": reference, **asdict(found)}
    if found.reference_perplexity is not None:
        facts["perplexity_ratio"] = found.perplexity / found.reference_perplexity
    return {**facts, "greedy": None if greedy is None else asdict(greedy)}


def _show(found: Prediction, greedy: GreedyAgreement | None) -> None:
    lines = {"perplexity": f"{found.perplexity:.4f} over {found.tokens} tokens"}
    if found.reference_perplexity is not None:
        ratio = found.perplexity / found.reference_perplexity
        lines["reference perplexity"] = f"{found.reference_perplexity:.4f}, ratio {ratio:.5f}"
        lines["KL divergence"] = f"mean {found.mean_kl:.3g}, largest {found.max_kl:.3g}"
        lines["top-1 agreement"] = f"{100 * (found.top1_agreement or 0):.2f} %"
    if greedy is not None:
        share = f"{100 * greedy.agreement:.1f} % of tokens"
        lines["greedy agreement"] = f"{share}, {greedy.equal_prompts} of {greedy.prompts} prompts throughout"
        lines["decoding"] = f"{greedy.tokens_per_second:.0f} tokens/s, {greedy.prompts} prompts at once"
    lines["reading"] = f"{found.tokens_per_second:.0f} tokens/s"
    for name, value in lines.items():
        click.echo(f"{name + ':':<22}{value}")
