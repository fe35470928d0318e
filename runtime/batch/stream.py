"""Answer lines as they arrive, without a journal, for pipes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from .inputs.lines import BadLine, BatchLine, CustomIds, parse_row, refuse_duplicate
from .inputs.sources import Source
from .inputs.templates import PromptTemplate
from .jobs.journal import LineResult, Totals
from .run import Executor
from .workers.offline import failed


def stream(
    executor: Executor,
    source: Source,
    template: PromptTemplate,
    write: Callable[[bytes], None],
    *,
    endpoint: str | None = None,
    stop: threading.Event | None = None,
) -> Totals:
    """Answer all rows; write the answers, failed ones included, as they finish; return the sums.

    Args:
        executor: answers the lines.
        source: the rows.
        template: makes requests from records.
        write: writes one line of output, given without its line break. Two threads call it, one at a time.
        endpoint: the only url that lines may use; None allows all.
        stop: the run ends early once this is set.
    """
    totals, turn, ids = Totals(), threading.Lock(), CustomIds()

    def put(answer: LineResult) -> None:
        with turn:
            totals.add(answer)
            write(answer.line)

    def lines() -> Iterator[BatchLine]:
        for row in source:
            line = parse_row(row, template, endpoint)
            if isinstance(line, BatchLine):
                line = refuse_duplicate(line, row, ids)
            if isinstance(line, BadLine):
                put(failed(line, line.code, line.message))
            else:
                yield line

    try:
        for answer in executor.run(lines(), stop or threading.Event()):
            put(answer)
    finally:
        ids.close()
    return totals
