"""The options of ``SamplingParams`` on a command line, in sections of the help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..errors import UsageError
from ..runtime.models.loading import LoadedModel
from ..runtime.types.sampling_params import SamplingParams
from .sections import SectionOption

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def _sampling(*names: str, help: str, section: str = "Choosing tokens", **attributes: Any) -> Any:  # noqa: A002
    return click.option(*names, cls=SectionOption, section=section, help=help, **attributes)


READABLE = click.Path(path_type=Path, exists=True, dir_okay=False)
_LENGTH, _REPEATS, _FORM = "Length and number", "Against repetition", "Form of the text (one of these)"
_STRUCTURED = ("json_schema", "json_object", "regex", "grammar", "choice")
_OPTIONS = (
    _sampling("--temperature", type=float, help="0 takes the likeliest.  [default: the checkpoint's, or 0]"),
    _sampling("--top-k", type=int, help="Keep this many of the likeliest tokens."),
    _sampling("--top-p", type=float, help="Keep the likeliest tokens with this total probability."),
    _sampling("--min-p", type=float, help="Drop tokens less likely than this share of the likeliest."),
    _sampling("--typical-p", type=float, help="Keep the tokens closest to the expected surprise."),
    _sampling("--mirostat", type=int, help="2 keeps the surprise of the text constant, instead of filters."),
    _sampling("--mirostat-tau", type=float, help="Bits of surprise a token that mirostat aims at."),
    _sampling("--mirostat-eta", type=float, help="How fast mirostat moves its bound."),
    _sampling(
        "--xtc-probability", type=float, help="How often likely tokens but the least likely are dropped."
    ),
    _sampling("--xtc-threshold", type=float, help="How likely those are, at least."),
    _sampling("--seed", type=int, help="Makes sampling reproducible."),
    _sampling(
        "--repetition-penalty", type=float, section=_REPEATS, help="Above 1, repeats become less likely."
    ),
    _sampling(
        "--presence-penalty", type=float, section=_REPEATS, help="Subtracted once from tokens generated."
    ),
    _sampling("--frequency-penalty", type=float, section=_REPEATS, help="Subtracted for each occurrence."),
    _sampling(
        "--no-repeat-ngram-size", type=int, section=_REPEATS, help="No so many tokens occur twice in a row."
    ),
    _sampling(
        "--dry-multiplier", type=float, section=_REPEATS, help="Penalty on repeating runs of tokens (DRY)."
    ),
    _sampling("--dry-base", type=float, section=_REPEATS, help="How it grows with each token repeated."),
    _sampling("--dry-allowed-length", type=int, section=_REPEATS, help="Shorter runs cost nothing."),
    _sampling(
        "--max-tokens",
        type=int,
        default=256,
        show_default=True,
        section=_LENGTH,
        help="Most tokens to generate.",
    ),
    _sampling("--min-tokens", type=int, section=_LENGTH, help="No end before so many."),
    _sampling(
        "--stop", multiple=True, metavar="TEXT", section=_LENGTH, help="End before this. May be repeated."
    ),
    _sampling("--json-schema", type=READABLE, section=_FORM, help="JSON that this file's schema describes."),
    _sampling("--json-object", is_flag=True, section=_FORM, help="Any JSON object."),
    _sampling("--regex", section=_FORM, help="What this regular expression matches."),
    _sampling("--grammar", type=READABLE, section=_FORM, help="What this file's Lark grammar describes."),
    _sampling(
        "--choice", multiple=True, metavar="TEXT", section=_FORM, help="One of these; give it repeatedly."
    ),
)
_SAMPLES = (
    _sampling("-n", type=int, section=_LENGTH, help="How many continuations; their seeds count up."),
    _sampling("--best-of", type=int, section=_LENGTH, help="Generate so many, show the n likeliest."),
    _sampling(
        "--logprobs", type=int, section=_LENGTH, help="With --json: log-probabilities of so many tokens."
    ),
)


def sampling_options(function: Decorated) -> Decorated:
    """Add the options that concern one continuation."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def samples_options(function: Decorated) -> Decorated:
    """Add the options for several continuations, and what is told about them."""
    for option in reversed(_SAMPLES):
        function = option(function)
    return function


def sampling_params(model: LoadedModel, given: dict[str, Any]) -> SamplingParams:
    """Return the checkpoint's own options (greedy if it states none), changed by those that were given.

    Raises:
        InvalidSamplingError: an option is out of range.
    """
    own = model.defaults.sampling or {"temperature": 0.0}
    stated = {name: value for name, value in given.items() if value is not None}
    form = {name: stated.pop(name) for name in _STRUCTURED if name in stated}
    form = {
        name: _content(value) if isinstance(value, Path) else value for name, value in form.items() if value
    }
    if form:
        stated["structured_output"] = form
    return SamplingParams.from_dict({**own, **stated})


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text in UTF-8, see its byte {error.start}") from error
