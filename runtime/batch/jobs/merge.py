"""Merge the answers of several jobs into one file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ....errors import OutputExistsError
from ...types.arguments import checked_arguments
from ..inputs.files import check_folder, exists, plain_suffix
from .job import find_folder
from .journal import Journal, LineResult
from .output import kept_columns, write_lines, write_parquet


@checked_arguments
def merge_jobs(jobs: Sequence[str | Path], output: str, errors: str | None = None) -> int:
    """Write the answers of several jobs to one file; return the number of results.

    Args:
        jobs: folders or outputs of jobs; their answers are written in this order.
        output: file or URL of the results: Parquet if it ends in ``.parquet``, else JSON lines.
        errors: file or URL of the failed lines, as JSON lines; None writes none.

    Raises:
        UsageError: a job or a folder does not exist.
        OutputExistsError: a file exists.
        OSError: a file cannot be written.
    """
    for name in (output,) if errors is None else (output, errors):
        check_folder(name)
        if exists(name):
            raise OutputExistsError(f"{name} exists; choose another name")
    journals = [Journal(find_folder(job), read_only=True) for job in jobs]
    try:
        if plain_suffix(output) == ".parquet":
            kept = kept_columns(_answers(journals, "code IS NULL AND extra IS NOT NULL"))
            write_parquet(_answers(journals, "code IS NULL"), output, journals[0].fact("job"), kept)
        else:
            write_lines(_lines(journals, "code IS NULL"), output)
        if errors is not None:
            write_lines(_lines(journals, "code IS NOT NULL"), errors)
        return sum(journal.totals().completed for journal in journals)
    finally:
        for journal in journals:
            journal.close()


def _answers(journals: Sequence[Journal], condition: str) -> Iterator[LineResult]:
    for journal in journals:
        yield from journal.answers(condition)


def _lines(journals: Sequence[Journal], condition: str) -> Iterator[bytes]:
    for journal in journals:
        yield from journal.lines(condition)
