"""``AsyncLLM``: generation for many concurrent callers, with an engine in a background thread."""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from ...errors import CarryallError, EngineClosedError, RequestError, RequestFailedError
from ..engine.engine import EngineConfig
from ..engine.requests.request import Request
from ..engine.stats import EngineStats
from ..process.delivery import Delivery
from ..process.faults import fault_text, log_fault, raised_in_thread
from ..text.chat_template import Message
from ..types.outputs import RequestOutput
from ..types.sampling_params import SamplingParams
from .embedding import Pooling, check_pooling, embedding_questions, stacked
from .prompts import ChatPrompt, Prompt, listed_prompts
from .request_stream import RequestStream
from .requests import RequestFactory
from .scoring import RERANK_INSTRUCTION, ContinuationScore, Questions, rerank_questions, score_questions
from .text_model import TextModel

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from ...progress import Progress
    from ..models.config import ModelConfig
    from ..models.loading import LoadedModel

T = TypeVar("T")
P = ParamSpec("P")

# Threads for work that would block an event loop. Only one tokenizes a long text at a time, which bounds the
# memory; the others serve short texts.
_TEXT_THREADS = 4


class AsyncLLM(TextModel):
    """A loaded model for concurrent generation from any number of coroutines and event loops.

    Args:
        model: as for ``LLM``.
        engine_config: options of the engine; None takes the defaults.
        progress: called for every tensor written, as (done, total, name).
        **fields: fields of ``ModelConfig`` and ``EngineConfig``, as for ``LLM``.

    Raises:
        UsageError: the model or an option is invalid; see the subclasses.
        ProviderUnavailableError: the provider is not available on this machine.
        CheckpointError: the checkpoint is damaged.
        PackageError: the package is damaged.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig | LoadedModel,
        *,
        engine_config: EngineConfig | None = None,
        progress: Progress | None = None,
        **fields: Any,
    ) -> None:
        from ..models.loading import open_engine  # slow to import: it imports the optimizer

        loaded, self._engine = open_engine(model, engine_config, fields, owner="AsyncLLM", progress=progress)
        self.name = loaded.name
        self._requests = RequestFactory(loaded)
        self._text_threads = ThreadPoolExecutor(_TEXT_THREADS, "carryall-text")
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []  # guarded by _wake, as are the next two
        self._streams: dict[str, RequestStream] = {}
        self._closed: str | None = None
        # Of the engine's thread.
        self._deliveries: dict[asyncio.AbstractEventLoop, Delivery[RequestStream, RequestOutput]] = {}
        self._thread = threading.Thread(target=self._work, name="carryall-engine", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)  # a device run must not outlive the interpreter

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        timeout: float | None = None,
        lora: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate from a prompt; yield the whole output each time it has grown.

        Closing the generator cancels the request.

        Args:
            prompt: text, token ids, or the result of ``render_chat``.
            params: None takes the checkpoint's own options, without a token limit.
            request_id: unique among the requests in progress; None generates one.
            priority: lower is served first.
            cache_salt: only requests with the same salt share cached prefixes.
            tenant: slots are shared fairly between tenants; None uses ``cache_salt``.
            timeout: seconds until the request ends with finish_reason "cancelled", stop_reason "deadline".
            lora: the name of a LoRA adapter; None is the base model.

        Raises:
            RequestError: the prompt or an option is invalid, or there is no such adapter.
            QueueFullError: too many requests are waiting.
            EngineClosedError: the engine was shut down.
        """
        stream = await self.add_request(
            prompt, params, request_id, priority, cache_salt, tenant, timeout, lora
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.cancel()

    async def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        timeout: float | None = None,
        lora: str | None = None,
    ) -> RequestStream:
        """Queue a request; return a stream to read or cancel it. See ``generate``."""
        params = self._requests.default_params(None) if params is None else params
        make = functools.partial(
            self._requests.group,
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            timeout=timeout,
            lora=lora,
        )
        group = make() if self._requests.is_quick(prompt, params) else await self._in_thread(make)
        stream = RequestStream(group, self._drop)
        if not self._tell(lambda: self._add(stream)):
            raise EngineClosedError(self._closed)
        return stream

    def abort(self, request_id: str) -> None:
        """Cancel a request; its reader gets a last state with finish_reason "cancelled"."""
        self._tell(lambda: self._abort(self._streams.get(request_id)))

    async def score(
        self, texts: str | Sequence[str], continuations: str | Sequence[str]
    ) -> list[ContinuationScore]:
        """Return log-probabilities of continuations; see ``LLM.score``."""
        return await self._ask(await self._in_thread(score_questions, self._requests, texts, continuations))

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str = RERANK_INSTRUCTION,
        answers: Sequence[str] = ("yes", "no"),
    ) -> list[float]:
        """Return for each document the probability that it answers a query; see ``LLM.rerank``."""
        asked = query, documents, instruction, answers
        return await self._ask(await self._in_thread(rerank_questions, self._requests, *asked))

    async def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: Pooling = "last", normalize: bool = True
    ) -> npt.NDArray[np.float32]:
        """Return embeddings [prompts, hidden_size]; see ``LLM.embed``."""
        check_pooling(pooling)
        listed = listed_prompts(prompts)
        tokens = await self._in_thread(lambda: [self._requests.token_ids(prompt) for prompt in listed])
        if not (size := self._engine.info.embedding_size):
            found = await self._in_thread(self._requests.encoder.embed, tokens, pooling)
            return stacked(*found, normalize=normalize)
        return stacked(await self._ask(embedding_questions(tokens, pooling)), size, normalize=normalize)

    async def render(self, messages: Sequence[Message], **options: Any) -> ChatPrompt:
        """Render a conversation to a prompt in a thread, without blocking the event loop."""
        return await self._in_thread(self.render_chat, messages, **options)

    async def token_ids(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a prompt, while the event loop goes on.

        Args:
            prompt: as for ``generate``; a text may be empty here.
            add_special_tokens: begin a text as the model expects texts to begin.

        Raises:
            RequestError: it is no prompt, is too long, or names tokens that do not exist.
        """
        if isinstance(prompt, str):
            return await self._in_thread(self._requests.encode, prompt, add_special_tokens=add_special_tokens)
        return await self._in_thread(self._requests.token_ids, prompt)

    async def text_of(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens, while the event loop goes on.

        Raises:
            RequestError: it is no list of tokens, or one does not exist.
        """
        known = await self.token_ids(token_ids) if token_ids else []
        return await self._in_thread(self.decode, known, skip_special_tokens=skip_special_tokens)

    async def _in_thread(self, work: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._text_threads, functools.partial(work, *args, **options))
        except RuntimeError as error:
            if self._closed is None:
                raise
            raise EngineClosedError(self._closed) from error
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise raised_in_thread("prepares texts", error) from error

    async def _ask(self, questions: Questions[T]) -> list[T]:
        room = asyncio.Semaphore(self.most_together)

        async def final(prompt: Prompt, params: SamplingParams) -> RequestOutput:
            async with room:
                return await self._final(prompt, params)

        asked = zip(questions.prompts, questions.params, strict=True)
        tasks = [asyncio.ensure_future(final(*each)) for each in asked]
        try:
            return questions.read(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # if one failed, the others are cancelled
                task.cancel()

    async def _final(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        """Run a request; return its last state."""
        stream = await self.add_request(prompt, params)
        try:
            return [output async for output in stream][-1]
        finally:
            stream.cancel()

    @property
    def most_together(self) -> int:
        """The most requests of one call in progress at a time: half of the queue is left to others."""
        limit = self._engine.config.max_queue
        return sys.maxsize if limit is None else self._engine.info.max_slots + limit // 2

    @property
    def max_loras(self) -> int:
        """The maximum number of resident LoRA adapters; 0 if the model was loaded without."""
        return self._engine.info.max_loras

    def adapter_names(self) -> tuple[list[str], list[str]]:
        """Return the names of the LoRA adapters of running requests, and of waiting ones."""
        return self._engine.adapter_names()

    def stats(self) -> EngineStats:
        """Return counters and gauges of the engine."""
        return self._engine.stats()

    def shutdown(self) -> None:
        """End all requests with EngineClosedError, free the model, and wait for the engine's thread."""
        atexit.unregister(self.shutdown)
        with self._wake:
            self._closed = self._closed or "the engine was shut down"
            self._wake.notify()
        self._thread.join()
        self._text_threads.shutdown(wait=False)
        self._requests.encoder.close()

    def _drop(self, stream: RequestStream) -> None:
        """Cancel the request of a stream; a running request with the same id is not affected."""
        self._tell(lambda: self._abort(stream))

    def _tell(self, command: Callable[[], None]) -> bool:
        """Queue ``command`` for the engine's thread, which runs it between steps; False if it has ended."""
        with self._wake:
            if self._closed is None and not self._thread.is_alive():
                self._closed = (
                    "the engine's thread does not survive a fork; create AsyncLLM in the child process"
                )
            if self._closed is None:
                self._inbox.append(command)
                self._wake.notify()
            return self._closed is None

    # The methods below run in the engine's thread.

    def _work(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._closed or self._inbox or self._engine.has_work)
                    if self._closed is not None:
                        return
                    inbox, self._inbox = self._inbox, []
                for command in inbox:
                    command()
                self._publish(self._engine.step())
        except BaseException as error:
            log_fault(_log, "-", "the engine", error)
            with self._wake:
                self._closed = f"the engine failed: {error!r}"
            raise
        finally:
            self._end()

    def _add(self, stream: RequestStream) -> None:
        added = []
        try:
            for request in stream.group.requests:
                if request.request_id in self._streams:
                    raise RequestError(f"request id '{request.request_id}' is in use; ids must be unique")
                self._engine.add(request)
                added.append(request)
        except Exception as error:  # noqa: BLE001 -- fails this request only
            for request in added:
                self._engine.cancel(request.request_id)
            if not isinstance(error, CarryallError):
                log_fault(_log, stream.group.request_id, "queueing it", error)
                error = RequestFailedError(fault_text("queueing the request", error))
            self._call(stream.loop, stream.fail, error)
        else:
            self._streams.update({request.request_id: stream for request in added})

    def _abort(self, stream: RequestStream | None) -> None:
        if stream is not None and self._streams.get(stream.group.request_id) is stream:
            self._cancel(stream)
            self._publish(stream.group.requests)

    def _cancel(self, stream: RequestStream) -> None:
        for request in stream.group.requests:
            self._engine.cancel(request.request_id)

    def _publish(self, requests: Sequence[Request]) -> None:
        """Send the states of the requests' groups to their readers, with one call per event loop."""
        batches: dict[asyncio.AbstractEventLoop, dict[RequestStream, RequestOutput]] = {}
        urgent: dict[asyncio.AbstractEventLoop, list[RequestStream]] = {}
        for stream in dict.fromkeys(self._streams[request.request_id] for request in requests):
            fault = stream.group.fault
            if fault is not None:
                self._cancel(stream)
                self._call(stream.loop, stream.fail, fault)
            else:
                batches.setdefault(stream.loop, {})[stream] = stream.group.snapshot()
                if stream.group.finished or not stream.begun:
                    urgent.setdefault(stream.loop, []).append(stream)
                stream.begun = True
            if stream.group.finished:
                self._remove(stream)
        for loop, batch in batches.items():
            try:
                self._delivery(loop).post(batch, urgent.get(loop, ()))
            except RuntimeError:  # the loop is closed
                self._forget(loop)

    def _delivery(self, loop: asyncio.AbstractEventLoop) -> Delivery[RequestStream, RequestOutput]:
        found = self._deliveries.get(loop)
        if found is None:
            kept = {known: one for known, one in self._deliveries.items() if not known.is_closed()}
            found = Delivery(loop, RequestStream.deliver)
            self._deliveries = {**kept, loop: found}
        return found

    def _forget(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the requests of an event loop that is closed."""
        for stream in {stream for stream in self._streams.values() if stream.loop is loop}:
            self._cancel(stream)
            self._remove(stream)

    def _remove(self, stream: RequestStream) -> None:
        for request in stream.group.requests:
            del self._streams[request.request_id]

    def _call(self, loop: asyncio.AbstractEventLoop, callback: Callable[[T], None], argument: T) -> bool:
        """Run ``callback`` in an event loop; False if that is closed."""
        try:
            loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:
            return False
        return True

    def _end(self) -> None:
        with self._wake:
            inbox, self._inbox = self._inbox, []
        for command in inbox:
            try:
                command()
            except Exception as error:  # noqa: BLE001 -- all readers below must get an error
                log_fault(_log, "-", "a command left over when the engine ended", error)
        for stream in set(self._streams.values()):
            self._call(stream.loop, stream.fail, EngineClosedError(self._closed))
        self._streams.clear()
        self._engine.close()
