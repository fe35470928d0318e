"""Answer batch lines with the service's engine, at a lower priority than interactive requests."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

from ....errors import (
    CarryallError,
    EngineClosedError,
    QueueFullError,
    ServiceUnavailableError,
)
from ...service.access.admission import Admission
from ...service.core.caller import CALLER, Caller
from ...service.core.handler import LLMHandler
from ...service.core.messages import ModelInfo
from ...service.http.openai.embeddings import embeddings_response, read_embeddings
from ...service.http.openai.transcriptions import transcript_json, whole_transcript
from ..inputs.lines import EMBEDDINGS, TRANSCRIPTIONS, TRANSLATIONS, BatchLine
from ..jobs.journal import LineResult
from ..workers.endpoints import read_generation
from ..workers.offline import completed, error_code, failed
from ..workers.transcriptions import read_recording
from .batch import Batch

# Priority of all batch lines. Interactive requests should have smaller numbers.
LOW_PRIORITY = 1_000_000
_POLL_SECONDS = 0.1
_RETRY_SECONDS = 0.5
_MOST_EMBEDDINGS = 8  # lines with embeddings at a time
# Errors that are retried.
_TRANSIENT = (QueueFullError, ServiceUnavailableError, EngineClosedError)


class ServedExecutor:
    """Answers the lines of a batch. A quarter of a model's slots stays free for interactive requests.

    Args:
        models: the service's models, with access control.
        loop: the event loop of the models.
        batch: the batch of the lines.
    """

    def __init__(
        self,
        models: Admission,
        loop: asyncio.AbstractEventLoop,
        batch: Batch,
    ) -> None:
        self._models = models
        self._loop = loop
        self._batch = batch
        self._most = 1
        self._model: str | None = None
        self._kinds = {
            EMBEDDINGS: self._embeddings,
            TRANSCRIPTIONS: self._transcription,
            TRANSLATIONS: self._transcription,
        }

    def facts(self) -> dict[str, Any]:
        """Return the name of the model that answered."""
        return {"model": self._model} if self._model else {}

    def close(self) -> None:
        """Do nothing: the models belong to the service."""

    def run(self, lines: Iterator[BatchLine], stop: threading.Event) -> Iterator[LineResult]:
        """Yield one answer per line, in the order of finishing; end early if ``stop`` is set."""
        ended: queue.SimpleQueue[concurrent.futures.Future[LineResult]] = queue.SimpleQueue()
        running: set[concurrent.futures.Future[LineResult]] = set()
        more = True
        try:
            while (more or running) and not stop.is_set():
                while more and len(running) < self._most:
                    line = next(lines, None)
                    if line is None:
                        more = False
                        break
                    future = asyncio.run_coroutine_threadsafe(self._answer(line), self._loop)
                    running.add(future)
                    future.add_done_callback(ended.put)
                with contextlib.suppress(queue.Empty):
                    future = ended.get(timeout=_POLL_SECONDS)
                    running.discard(future)
                    yield future.result()
        finally:
            for future in running:
                future.cancel()

    async def _answer(self, line: BatchLine) -> LineResult:
        """Return the answer of a line; retry while the model loads, or the queue or a budget is full."""
        CALLER.set(self._caller())  # each line has its own task
        while True:
            try:
                return await self._kinds.get(line.url, self._generation)(line)
            except _TRANSIENT:
                await asyncio.sleep(_RETRY_SECONDS)
            except CarryallError as error:
                return failed(line, error_code(error), str(error), worker="service")

    def _caller(self) -> Caller | None:
        """Return the owner of the batch; if its key was removed, with the rights at the creation."""
        owner, keys = self._batch.owner, self._models.policy.keys
        if owner is None:
            return None
        return (keys.named(owner) if keys else None) or Caller(owner, tuple(self._batch.models))

    async def _generation(self, line: BatchLine) -> LineResult:
        begin = time.monotonic()
        handler, info = await self._llm(line)
        asked = await asyncio.to_thread(read_generation, line, handler.defaults, 0)
        request = dataclasses.replace(
            self._models.admitted(asked.request),
            priority=LOW_PRIORITY,
            request_id=f"{self._batch.id}-{line.number}-{time.monotonic_ns()}",
        )
        result = await handler.complete(request)
        result = dataclasses.replace(result, request_id=f"batch_req_{line.number}")
        body, usage = asked.body(result, info.model, self._batch.created_at), result.usage
        tokens = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        reason, seconds = result.reason, time.monotonic() - begin
        return completed(line, body, reason, tokens, seconds=seconds, worker="service")

    async def _transcription(self, line: BatchLine) -> LineResult:
        begin = time.monotonic()
        handler, info = await self._llm(line)
        file, ask = await asyncio.to_thread(read_recording, line)
        transcript = await whole_transcript(handler, file, ask, priority=LOW_PRIORITY)
        body, seconds = transcript_json(transcript, ask.format), time.monotonic() - begin
        tokens = (0, transcript.num_tokens, 0)
        body = {**body, "model": info.model}
        return completed(line, body, "stop", tokens, seconds=seconds, worker="service")

    async def _llm(self, line: BatchLine) -> tuple[LLMHandler, ModelInfo]:
        """Return the model of a line, of whose slots most are for lines."""
        handler = await self._models.llm(_model(line))
        info = handler.info
        self._most = max(1, info.max_slots - max(1, info.max_slots // 4))
        self._model = info.model
        return handler, info

    async def _embeddings(self, line: BatchLine) -> LineResult:
        begin = time.monotonic()
        handler = await self._models.embedder(_model(line))
        self._most = _MOST_EMBEDDINGS
        self._model = handler.name
        ask = read_embeddings(line.body)
        found = await handler.embed(ask.inputs, **ask.options)
        body, seconds = embeddings_response(ask, found, handler.name), time.monotonic() - begin
        tokens = (found.prompt_tokens, 0, 0)
        return completed(line, body, "stop", tokens, seconds=seconds, worker="service")


def _model(line: BatchLine) -> str | None:
    name = line.body.get("model")
    return name if isinstance(name, str) else None
