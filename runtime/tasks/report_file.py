"""Write the file of a report: an HTML page or JSON, by its name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ...errors import CarryallError, UsageError
from ...graph_opt.pipeline.report import PipelineReport
from ...graph_opt.pipeline.report_page import to_html
from ...storage.paths import check_target
from ...storage.writing import hiding_scratch, write_whole, writing

_PAGE = ".html"


def check_report(path: Path | None) -> None:
    """Check before any work that a report can be written.

    Raises:
        UsageError: its folder does not exist, or it is a folder, a device or a pipe.
    """
    if path is None:
        return
    check_target(path)
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--report {path}: the folder {path.parent} does not exist")


def write_report(report: PipelineReport, path: Path) -> None:
    """Write a report as one HTML page if the name ends in .html, else as JSON."""
    write_whole(path, _text(report, path))


def _text(report: PipelineReport, path: Path) -> str:
    return (to_html(report) if path.suffix.lower() == _PAGE else report.to_json()) + "\n"


@contextlib.contextmanager
def pending_report(report: PipelineReport, path: Path, out: Path) -> Iterator[None]:
    """Write a report under a temporary name; rename it to ``path`` if the block, writing ``out``, succeeds.

    So a full disk is noticed before the work, and no report remains of work that failed.

    Raises:
        OSError: the report cannot be written.
        CarryallError: ``out`` was written, but the report cannot be renamed.
    """
    waiting = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with hiding_scratch(waiting, path), writing(path):
            waiting.write_text(_text(report, path), encoding="utf-8")
        yield
        with left_without_report(out, path), hiding_scratch(waiting, path):
            waiting.replace(path)
    finally:
        waiting.unlink(missing_ok=True)


@contextlib.contextmanager
def left_without_report(out: Path, report: Path) -> Iterator[None]:
    """Add to an error in the block that ``out`` was written, but its report was not.

    Raises:
        CarryallError: the block raised a CarryallError or an OSError.
    """
    try:
        yield
    except (CarryallError, OSError) as error:
        raise CarryallError(f"{out} was written, but its report {report} was not: {error}") from error
