"""Texts as arguments, or as the lines of a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError
from ..storage.texts import read_text


def lines_option(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option ``--lines FILE``."""
    return click.option(
        "--lines", metavar="FILE", type=click.Path(path_type=Path), help=f"{help_text} - is stdin."
    )


def given_lines(texts: Sequence[str], lines: Path | None) -> list[str]:
    """Return the texts that were typed, or the lines of a file without empty ones, whose number is told.

    Raises:
        UsageError: both or neither are given, or the file has no text, cannot be read, or is not UTF-8.
    """
    if (lines is None) == (not texts):
        raise UsageError("give texts, or a file of them with --lines")
    if lines is None:
        return list(texts)
    content = stdin_text() if str(lines) == "-" else read_text(lines)
    # Other separators that str.splitlines knows, such as U+2028, may be part of a text.
    all_lines = content.replace("\r\n", "\n").removesuffix("\n").split("\n")
    given = [line for line in all_lines if line.strip()]
    if not given:
        raise UsageError(f"{lines} has no text")
    if len(given) < len(all_lines):
        click.echo(f"note: {len(all_lines) - len(given)} empty lines of {lines} are left out", err=True)
    return given


def stdin_text() -> str:
    """Return what comes on stdin.

    Raises:
        UsageError: it is not UTF-8.
    """
    try:
        return sys.stdin.buffer.read().decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin cannot be read: it is not UTF-8 text at byte {error.start}") from error
