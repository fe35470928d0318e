"""Options of the verbs that keep an engine busy: where and how a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from .generation import (
    context_option,
    kv_cache_option,
    num_speculative_option,
    quantize_option,
    speculative_option,
)
from .options import allow_fallback_option, ep_library_option, provider_option, provider_options_option

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_OPTIONS = (
    provider_option,
    provider_options_option,
    ep_library_option,
    allow_fallback_option,
    quantize_option,
    context_option,
    kv_cache_option,
    speculative_option,
    num_speculative_option,
    click.option(
        "--max-slots",
        type=click.IntRange(1),
        default=32,
        show_default=True,
        help="Most requests computed at once.",
    ),
    click.option(
        "--num-threads",
        type=click.IntRange(0),
        default=0,
        help="CPU threads; by default the provider chooses.",
    ),
)


def load_options(function: Decorated) -> Decorated:
    """Add the options that ``LoadOptions`` names."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
