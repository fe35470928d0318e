"""Requests of a batch file through the engine, a bounded number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...errors import ProviderError, RequestCancelled, RequestError
from ..service.deltas import collect
from ..service.handler import LLMHandler
from ..service.messages import Generation
from .lines import BadLine, BatchLine

Record = dict[str, Any]


@dataclass(slots=True)
class BatchSummary:
    """What a run did."""

    completed: int = 0
    failed: int = 0
    skipped: int = 0  # had a result before
    prompt_tokens: int = 0
    completion_tokens: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # how many of each code


class BatchRun:
    """Works through lines; every line that is not skipped gets one result, in the order of finishing.

    Args:
        handler: ready to generate.
        write: takes one result.
        finished: custom_ids that have a result already.
    """

    def __init__(
        self, handler: LLMHandler, write: Callable[[Record], None], finished: Collection[str] = ()
    ) -> None:
        self.summary = BatchSummary()
        self._handler = handler
        self._write = write
        self._finished = finished

    async def run(self, lines: Iterator[BatchLine | BadLine], in_flight: int) -> BatchSummary:
        """Send at most ``in_flight`` requests at a time; no more lines than that are held.

        Raises:
            CarryallError, OSError: the run cannot go on; results so far have been written.
        """
        reading = asyncio.Lock()

        async def work() -> None:
            while True:
                async with reading:  # in a thread: a pipe may keep us waiting
                    line = await asyncio.to_thread(next, lines, None)
                if line is None:
                    return
                await self._handle(line)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(in_flight):
                    group.create_task(work())
        except ExceptionGroup as failures:  # the first failure cancelled the other workers
            raise failures.exceptions[0] from None
        return self.summary

    async def _handle(self, line: BatchLine | BadLine) -> None:
        if line.custom_id in self._finished and isinstance(line, BatchLine):
            self.summary.skipped += 1
            return
        if isinstance(line, BadLine):
            self._fail(line.number, line.custom_id, line.code, line.message)
            return
        try:
            result = await collect(self._handler.generate(line.request))
        except RequestError as error:
            self._fail(line.number, line.custom_id, "invalid_request", str(error))
        except (ProviderError, RequestCancelled) as error:
            self._fail(line.number, line.custom_id, "server_error", str(error))
        else:
            self._complete(line, result)

    def _complete(self, line: BatchLine, result: Generation) -> None:
        body = line.endpoint.response(line.request, result, self._handler.model.info.model)
        response = {"status_code": 200, "request_id": result.request_id, "body": body}
        self.summary.completed += 1
        self.summary.prompt_tokens += result.usage.prompt_tokens
        self.summary.completion_tokens += result.usage.completion_tokens
        self._write(_record(line.number, line.custom_id, response=response))

    def _fail(self, number: int, custom_id: str | None, code: str, message: str) -> None:
        self.summary.failed += 1
        self.summary.errors[code] = self.summary.errors.get(code, 0) + 1
        self._write(_record(number, custom_id, error={"code": code, "message": message, "line": number}))


def _record(
    number: int, custom_id: str | None, response: Record | None = None, error: Record | None = None
) -> Record:
    return {"id": f"batch_req_{number}", "custom_id": custom_id, "response": response, "error": error}
