"""Options of ``verify`` and ``optimize --verify``: inputs and tolerances."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..graph_opt.compare.bars import MAX_ERROR, MAX_KL_FLOAT, MAX_KL_ROUNDED, Bars
from .options import number

Command = Callable[..., Any]

inputs_option = click.option(
    "--inputs",
    type=click.Path(path_type=Path, exists=True),
    help="Input tensors by name: an .npz file, or a folder of such files. For decoders, input_ids is enough. "
    "Default: generated from the types and shapes of the graph's inputs.",
)
_OPTIONS = (
    click.option(
        "--max-kl",
        type=number(0),
        help="Bar of decoders: maximum KL divergence, in nats. "
        f"[default: {MAX_KL_FLOAT:g}; {MAX_KL_ROUNDED:g} if a graph rounds its activations]",
    ),
    click.option(
        "--max-error",
        type=number(0),
        help="Bar of float outputs: maximum error, relative to the range of the reference's values. "
        f"[default: {MAX_ERROR:g}; more for 16 bits]",
    ),
    click.option(
        "--max-mismatch",
        type=number(0, 1),
        default=0.0,
        show_default=True,
        help="Bar of integer, boolean and string outputs: maximum share of different elements.",
    ),
)


def bars_options(function: Command) -> Command:
    """Add the options, and pass them as one argument, ``bars``."""

    @functools.wraps(function)
    def gather(*, max_kl: float | None, max_error: float | None, max_mismatch: float, **given: Any) -> Any:
        bars = Bars(max_kl=max_kl, max_error=max_error, max_mismatch=max_mismatch)
        return function(bars=bars, **given)

    command: Command = gather
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
