"""The options that say where and how a model is loaded, the same for every verb that runs one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from ..graph_opt.quantize.methods import METHODS
from ..runtime.models.loading import LoadOptions
from .options import allow_fallback_option, ep_library_option, provider_option, provider_options_option

Command = Callable[..., Any]

quantize_option = click.option(
    "--quantize", type=click.Choice(list(METHODS)), help="Quantize first, in the cache."
)
context_option = click.option(
    "--context-length", type=click.IntRange(1), help="Longest sequence; the model's own by default."
)
kv_cache_option = click.option(
    "--kv-cache",
    type=click.Choice(["int8", "float32"]),
    help="Type of the KV cache; by default int8 where the model was quantized with --kv int8.",
)
num_threads_option = click.option(
    "--num-threads", type=click.IntRange(0), default=0, help="CPU threads; by default the provider chooses."
)
squeeze_kv_option = click.option(
    "--squeeze-kv",
    type=click.IntRange(1),
    metavar="TOKENS",
    help="Keep KV of about so many tokens a request while it generates. Saves memory and time in long texts; "
    "lossy.",
)
_MODEL = (
    provider_option,
    provider_options_option,
    ep_library_option,
    allow_fallback_option,
    quantize_option,
    context_option,
    kv_cache_option,
    num_threads_option,
)
_SPECULATIVE = (
    click.option(
        "--speculative",
        metavar="METHOD",
        help="Propose tokens to check several at a time: prompt-lookup, or draft:MODEL with a smaller model "
        "of the same tokenizer. Changes the speed, not the text.",
    ),
    click.option("--num-speculative-tokens", type=click.IntRange(1), help="Most tokens proposed at a time."),
)
_SLOTS = click.option(
    "--max-slots",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Most requests computed at once.",
)


def _gathered(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """A decorator that adds options and hands their values over as one argument, ``loading``."""

    def nothing() -> None:
        """Takes the options to learn their names."""

    names = {option(nothing).__click_params__[-1].name for option in options}  # type: ignore[attr-defined]

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def gather(**given: Any) -> Any:
            loading = {name: given.pop(name) for name in names}
            return function(loading=LoadOptions(**loading), **given)  # type: ignore[typeddict-item]

        command: Command = gather
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


# For verbs that run one request at a time, that measure, and that keep an engine busy.
single_options = _gathered(*_MODEL, *_SPECULATIVE)
measured_options = _gathered(*_MODEL)
load_options = _gathered(*_MODEL, *_SPECULATIVE, _SLOTS)
