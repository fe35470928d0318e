"""Requests in, deltas out: the service without its transports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress

from ....errors import EngineClosedError, ServiceUnavailableError
from ...api.async_llm import AsyncLLM, RequestStream
from ...api.requests import RENDER_OPTIONS, Prompt
from ...text.chat_template import check_variables
from .deltas import DeltaTracker
from .messages import Conversation, Delta, GenerationRequest
from .served_model import ServedModel

LOADING = "the model is still loading; retry later"
STOPPING = "the service is shutting down; retry elsewhere"
CUT_OFF = "the service was shut down before the request was finished; retry elsewhere"
_FAREWELL_SECONDS = 0.5


class LLMHandler:
    """Serves requests from one engine, from `ready` until `drain`. Lives in one event loop."""

    def __init__(self) -> None:
        self._model: ServedModel | None = None
        self._refusal: str | None = LOADING
        self.engine_lost = asyncio.Event()  # set once a request has met a dead engine
        self._active = 0
        self._streams: set[RequestStream] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def ready(self, model: ServedModel) -> None:
        """Accept requests from now on."""
        self._model = model
        self._refusal = None

    @property
    def model(self) -> ServedModel:
        """The model that is served.

        Raises:
            ServiceUnavailableError: it is still loading.
        """
        if self._model is None:
            raise ServiceUnavailableError(LOADING)
        return self._model

    @property
    def active(self) -> int:
        """How many requests are in progress."""
        return self._active

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yield the continuation as it grows. Closing the generator cancels the request.

        Raises:
            ServiceUnavailableError: the model is loading, or the service is shutting down.
            RequestError: the request is at fault.
            QueueFullError: too many requests are waiting.
            EngineClosedError: the engine was shut down meanwhile.
            ProviderRuntimeError: the model failed to run.
        """
        with self._in_progress() as llm:
            stream = await llm.add_request(
                await _prompt(llm, request.prompt),
                request.params,
                request.request_id,
                request.priority,
                request.cache_salt,
                request.tenant,
                request.timeout,
            )
            self._streams.add(stream)
            tracker = DeltaTracker()
            try:
                async for output in stream:
                    for delta in tracker.advance(output):
                        yield delta
            finally:
                self._streams.discard(stream)
                stream.cancel()

    async def drain(self, grace_seconds: float) -> bool:
        """Refuse new requests and wait for those in progress, then end what is left with an error.

        Returns:
            Whether all ended in time.
        """
        self._refusal = STOPPING
        try:
            await asyncio.wait_for(self._idle.wait(), grace_seconds)
        except TimeoutError:
            for stream in self._streams:
                stream.fail(ServiceUnavailableError(CUT_OFF))
            with suppress(TimeoutError):  # the answers leave now; who does not take theirs loses it
                await asyncio.wait_for(self._idle.wait(), _FAREWELL_SECONDS)
            return False
        return True

    @contextmanager
    def _in_progress(self) -> Iterator[AsyncLLM]:
        if self._refusal is not None:
            raise ServiceUnavailableError(self._refusal)
        self._active += 1
        self._idle.clear()
        try:
            yield self.model.llm
        except EngineClosedError:
            self.engine_lost.set()
            raise
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()


async def _prompt(llm: AsyncLLM, prompt: str | list[int] | Conversation) -> Prompt:
    """A prompt as the engine takes it."""
    if not isinstance(prompt, Conversation):
        return prompt
    check_variables(prompt.variables, RENDER_OPTIONS)
    return await llm.render(prompt.messages, tools=prompt.tools or None, **prompt.variables)
