"""Reports, which the functions of ``carryall`` return: as JSON, as text, and as a table in a notebook."""

from __future__ import annotations

import abc
import json
import math
from pathlib import Path
from typing import Any


class Report(abc.ABC):
    """The result of a function. ``str`` gives text for people, ``to_json`` one line of strict JSON."""

    @abc.abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return all values, as types that JSON supports; paths are allowed."""

    @abc.abstractmethod
    def rows(self) -> list[tuple[str, str]]:
        """Return the lines for people, each a label and a text."""

    def to_json(self) -> str:
        """Return ``to_dict`` as one line of JSON; NaN and infinity become null."""
        return json.dumps(json_value(self.to_dict()), ensure_ascii=False, allow_nan=False)

    def __str__(self) -> str:
        rows = self.rows()
        width = max((len(label) for label, _ in rows), default=0) + 2
        return "\n".join(f"{label and label + ':':<{width}}{text}" for label, text in rows)

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self.rows())


def html_table(title: str, rows: list[tuple[str, str]]) -> str:
    """Return an HTML table for a notebook."""
    import html  # 1 ms of each start, with its names of characters

    lines = "".join(
        f"<tr><th style='text-align:left'>{html.escape(label)}</th>"
        f"<td style='text-align:left;white-space:pre-wrap'>{html.escape(text)}</td></tr>"
        for label, text in rows
    )
    return f"<table><caption>{html.escape(title)}</caption>{lines}</table>"


def json_value(value: Any) -> Any:
    """Return a value that strict JSON can encode: paths become text, NaN and infinity become None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): json_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def human_bytes(size: float) -> str:
    """Return a size in bytes as text with a decimal unit: ``14.7 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
