"""Answer the rows of a table in memory: pandas, Polars, or Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...errors import RequestError, UsageError
from ..types.arguments import checked_arguments
from .job_thread import run
from .jobs.output import text_of


@checked_arguments
def map_table(
    table: Any,
    template: str,
    *,
    model: str | Path,
    into: str = "output",
    strict: bool = True,
    **options: Any,
) -> Any:
    """Return a copy of a table with one more column: the generated text of each row.

    Args:
        table: a pandas or Polars DataFrame, or a datasets.Dataset. None of these packages is imported here.
        template: Jinja source over the columns, such as ``Summarize: {{ text }}``.
        model: as for ``load_model``.
        into: the name of the new column.
        strict: raise if a row fails; otherwise the text of a failed row is None.
        **options: options of ``carryall.batch.run``. With ``output``, the same call resumes the job.

    Raises:
        UsageError: the kind of table is unknown, the table has the column already, or an option is wrong.
        RequestError: a row failed, and ``strict`` is True.
    """
    records, attach = _adapter(table, into)
    texts: dict[int, str | None] = {}
    count = 0

    def numbered() -> Iterable[Mapping[str, Any]]:
        nonlocal count
        for record in records:
            count += 1
            yield record

    with run(numbered(), model=model, template=template, **options) as job:
        for record in job:
            number = int(record["id"].rpartition("_")[2])
            if record["error"] is not None and strict:
                raise RequestError(f"row {number} of the table: {record['error']['message']}")
            texts[number] = None if record["error"] is not None else text_of(record["response"]["body"])
    return attach([texts.get(number) for number in range(1, count + 1)])


def _adapter(table: Any, into: str) -> tuple[Iterable[Mapping[str, Any]], Any]:
    """Return the rows of a table, and a function that returns the table with a column added."""
    columns = list(getattr(table, "column_names", getattr(table, "columns", ())))
    if into in columns:
        raise UsageError(f"the table already has a column '{into}'; choose another name with into=")
    if hasattr(table, "add_column"):  # datasets.Dataset
        return table, lambda values: table.add_column(into, values)
    if hasattr(table, "iter_rows"):  # polars.DataFrame
        make = type(table)
        return table.iter_rows(named=True), lambda values: table.with_columns(make({into: values})[into])
    if hasattr(table, "to_dict") and hasattr(table, "assign"):  # pandas.DataFrame
        return table.to_dict(orient="records"), lambda values: table.assign(**{into: values})
    raise UsageError(
        f"the table must be a pandas or Polars DataFrame or a datasets.Dataset, not {type(table).__name__}"
    )
