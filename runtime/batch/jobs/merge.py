"""The answers of several jobs as one file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ....errors import OutputExistsError
from ...types.arguments import checked_arguments
from ..inputs.files import check_folder, exists, plain_suffix
from .job import find_folder
from .journal import Answer, Journal
from .output import kept_columns, write_lines, write_parquet


@checked_arguments
def merge_jobs(jobs: Sequence[str | Path], output: str, errors: str | None = None) -> int:
    """Write the answers that jobs have so far; return how many results there are.

    Args:
        jobs: folders of jobs or their outputs, in the order in which their answers are written.
        output: JSON lines, or Parquet if it ends so.
        errors: JSON lines of failed lines; None leaves them out.

    Raises:
        UsageError: a job or a folder does not exist.
        OutputExistsError: a file exists.
        OSError: a file cannot be written.
    """
    for name in filter(None, (output, errors)):
        check_folder(name)
        if exists(name):
            raise OutputExistsError(f"{name} exists; choose another name")
    journals = [Journal(find_folder(job), read_only=True) for job in jobs]
    try:
        if plain_suffix(output) == ".parquet":
            kept = kept_columns(_answers(journals, "code IS NULL AND extra IS NOT NULL"))
            write_parquet(_answers(journals, "code IS NULL"), output, journals[0].fact("job"), kept)
        else:
            write_lines(_answers(journals, "code IS NULL"), output)
        if errors is not None:
            write_lines(_answers(journals, "code IS NOT NULL"), errors)
        return sum(journal.totals().completed for journal in journals)
    finally:
        for journal in journals:
            journal.close()


def _answers(journals: Sequence[Journal], condition: str) -> Iterator[Answer]:
    for journal in journals:
        yield from journal.answers(condition)
