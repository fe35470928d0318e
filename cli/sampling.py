"""Command line options for ``SamplingParams``, in sections of the help."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import click

from ..options import declared
from ..runtime.models.loading import LoadedModel
from ..runtime.types.sampling_params import SamplingParams
from .declared_options import declared_option
from .options import text_or_file
from .sections import SectionOption

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

READABLE = click.Path(path_type=Path, exists=True, dir_okay=False)
# Attributes of single flags. The default of other flags is that of the checkpoint or of SamplingParams.
_OWN: dict[str, dict[str, Any]] = {
    "temperature": {"show_default": "the checkpoint's, or 0"},
    "max_tokens": {"default": 256, "show_default": True},
    "logprobs": {"help": "With --json: log-probabilities of this many tokens."},
}
_FORM = "Structured output (one of these)"
_FORMS: dict[str, dict[str, Any]] = {
    "json_schema": {"metavar": "TEXT|@FILE", "help": "Generate JSON that matches this schema."},
    "json_object": {"is_flag": True, "help": "Generate any JSON object."},
    "regex": {"help": "Generate text that matches this regular expression."},
    "grammar": {"metavar": "TEXT|@FILE", "help": "Generate text of this Lark grammar."},
    "choice": {
        "multiple": True,
        "metavar": "TEXT",
        "help": "Generate one of these texts. May be repeated.",
    },
}
_TEXTS = ("json_schema", "grammar")  # forms that a text or a file states


def sampling_options(*, without: Collection[str] = ()) -> Callable[[Decorated], Decorated]:
    """Return a decorator that adds a flag for each field of ``SamplingParams`` with a section.

    Args:
        without: fields that do not apply to the verb.
    """
    options = [
        declared_option(each, **{"section": each.section, "default": None, **_OWN.get(each.name, {})})
        for each in declared(SamplingParams).values()
        if each.section and each.name not in without
    ]
    options += [
        click.option(f"--{name.replace('_', '-')}", cls=SectionOption, section=_FORM, **attributes)
        for name, attributes in _FORMS.items()
    ]

    def decorate(function: Decorated) -> Decorated:
        for add in reversed(options):
            function = add(function)
        return function

    return decorate


def sampling_params(model: LoadedModel, options: dict[str, Any]) -> SamplingParams:
    """Return the checkpoint's own options (greedy if it has none), overridden by the given ones.

    Raises:
        InvalidSamplingError: an option is out of range.
    """
    defaults = model.defaults.sampling or {"temperature": 0.0}
    # None means that the flag was not given; for flags with a default it means that "none" was given.
    stated = {
        name: value for name, value in options.items() if value is not None or "default" in _OWN.get(name, {})
    }
    form = {name: stated.pop(name) for name in _FORMS if name in stated}
    form = {
        name: text_or_file(value, bare=True) if name in _TEXTS else value
        for name, value in form.items()
        if value
    }
    if form:
        stated["structured_output"] = form
    return SamplingParams.from_dict({**defaults, **stated})
