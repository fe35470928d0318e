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
    _sampling(
        "--temperature",
        type=float,
        help="Sampling temperature; 0 is greedy.  [default: the checkpoint's, or 0]",
    ),
    _sampling("--top-k", type=int, help="Sample from the K most likely tokens."),
    _sampling("--top-p", type=float, help="Sample from the most likely tokens with this total probability."),
    _sampling("--min-p", type=float, help="Drop tokens less likely than this share of the most likely one."),
    _sampling(
        "--typical-p", type=float, help="Locally typical sampling: total probability of the tokens kept."
    ),
    _sampling("--mirostat", type=int, help="2 enables Mirostat 2, which replaces top-k, top-p and min-p."),
    _sampling("--mirostat-tau", type=float, help="Target surprise of Mirostat, in bits per token."),
    _sampling("--mirostat-eta", type=float, help="Learning rate of Mirostat."),
    _sampling("--xtc-probability", type=float, help="Probability of applying XTC."),
    _sampling("--xtc-threshold", type=float, help="Probability from which XTC drops a token."),
    _sampling("--seed", type=int, help="Seed of the random numbers, for reproducible sampling."),
    _sampling(
        "--repetition-penalty",
        type=float,
        section=_REPEATS,
        help="Penalty on tokens that occurred before; above 1 makes them less likely.",
    ),
    _sampling(
        "--presence-penalty",
        type=float,
        section=_REPEATS,
        help="Subtracted from the logit of each token generated before.",
    ),
    _sampling(
        "--frequency-penalty",
        type=float,
        section=_REPEATS,
        help="Subtracted from a token's logit for each time it was generated.",
    ),
    _sampling(
        "--no-repeat-ngram-size", type=int, section=_REPEATS, help="Never repeat an n-gram of this length."
    ),
    _sampling(
        "--dry-multiplier",
        type=float,
        section=_REPEATS,
        help="Penalty on continuing a repeated sequence (DRY).",
    ),
    _sampling(
        "--dry-base", type=float, section=_REPEATS, help="Growth of the DRY penalty per repeated token."
    ),
    _sampling(
        "--dry-allowed-length",
        type=int,
        section=_REPEATS,
        help="Shortest repeated sequence that DRY penalizes, in tokens.",
    ),
    _sampling(
        "--max-tokens",
        type=int,
        default=256,
        show_default=True,
        section=_LENGTH,
        help="Maximum number of tokens to generate.",
    ),
    _sampling("--min-tokens", type=int, section=_LENGTH, help="Minimum number of tokens to generate."),
    _sampling(
        "--stop",
        multiple=True,
        metavar="TEXT",
        section=_LENGTH,
        help="Stop before this text. May be repeated.",
    ),
    _sampling(
        "--json-schema",
        type=READABLE,
        section=_FORM,
        help="Generate JSON that matches the schema in this file.",
    ),
    _sampling("--json-object", is_flag=True, section=_FORM, help="Generate any JSON object."),
    _sampling("--regex", section=_FORM, help="Generate text that matches this regular expression."),
    _sampling(
        "--grammar", type=READABLE, section=_FORM, help="Generate text of the Lark grammar in this file."
    ),
    _sampling(
        "--choice",
        multiple=True,
        metavar="TEXT",
        section=_FORM,
        help="Generate one of these texts. May be repeated.",
    ),
)
_SAMPLES = (
    _sampling("-n", type=int, section=_LENGTH, help="Number of continuations; their seeds count up."),
    _sampling("--best-of", type=int, section=_LENGTH, help="Generate this many and show the n most likely."),
    _sampling(
        "--logprobs", type=int, section=_LENGTH, help="With --json: log-probabilities of this many tokens."
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
