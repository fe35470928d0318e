"""The file of ``--report``: a page or JSON, by its name."""

from __future__ import annotations

from pathlib import Path

from ..errors import UsageError
from ..graph_opt.pipeline.report import Report
from ..graph_opt.pipeline.report_page import to_html

_PAGE = ".html"


def check_report(path: Path | None) -> None:
    """Refuse a report that could not be written, before any work.

    Raises:
        UsageError: its folder does not exist.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"--report {path}: there is no folder {path.parent}")


def write_report(report: Report, path: Path) -> None:
    """Write a self-contained page if the name ends in .html, else JSON."""
    text = to_html(report) if path.suffix.lower() == _PAGE else report.to_json()
    path.write_text(text + "\n", encoding="utf-8")
