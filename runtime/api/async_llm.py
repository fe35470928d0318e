"""``AsyncLLM``: generation for many concurrent callers, with an engine in a background thread."""

from __future__ import annotations

import asyncio
import atexit
import functools
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from ...errors import EngineClosedError
from ..audio.transcription import Segment, Transcription, next_step
from ..engine.engine import EngineConfig
from ..engine.stats import EngineStats
from ..process.faults import raised_in_thread
from ..text.chat_template import Message
from ..text.infill import Infill
from ..types.outputs import RequestOutput
from ..types.sampling_params import SamplingParams
from .embedding import Pooling, check_pooling, embedding_questions, encoded_tokens
from .engine_thread import EngineThread
from .prompts import ChatPrompt, EncodedPrompt, Prompt, listed_prompts
from .request_stream import RequestStream
from .requests import RequestFactory
from .scoring import (
    RERANK_INSTRUCTION,
    ContinuationScore,
    Questions,
    chat_score_questions,
    rerank_questions,
    score_questions,
)
from .text_model import TextModel
from .vectors import stacked

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

        loaded, self.engine = open_engine(model, engine_config, fields, owner="AsyncLLM", progress=progress)
        self.name = loaded.name
        self.requests = RequestFactory(loaded, self.engine.config)
        self._text_threads = ThreadPoolExecutor(_TEXT_THREADS, "carryall-text")
        self._thread = EngineThread(self.engine)
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
        pin_seconds: float = 0.0,
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
            pin_seconds: how long its KV is evicted after that of others, when the request has ended.

        Raises:
            RequestError: the prompt or an option is invalid, or there is no such adapter.
            QueueFullError: too many requests are waiting.
            EngineClosedError: the engine was shut down.
        """
        stream = await self.add_request(
            prompt, params, request_id, priority, cache_salt, tenant, timeout, lora, pin_seconds
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
        pin_seconds: float = 0.0,
    ) -> RequestStream:
        """Queue a request; return a stream to read or cancel it. See ``generate``."""
        params = self.requests.default_params(None) if params is None else params
        make = functools.partial(
            self.requests.group,
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            timeout=timeout,
            lora=lora,
            pin_seconds=pin_seconds,
        )
        group = make() if self.requests.is_quick(prompt, params) else await self._in_thread(make)
        stream = RequestStream(group, self._thread.drop)
        self._thread.add(stream)
        return stream

    def abort(self, request_id: str) -> None:
        """Cancel a request; its reader gets a last state with finish_reason "cancelled"."""
        self._thread.abort(request_id)

    def end_thought(self, request_id: str) -> None:
        """End the thought of a request with its next token; the request must have a ``reasoning_budget``."""
        self._thread.end_thought(request_id)

    async def score(
        self, texts: str | Sequence[str], continuations: str | Sequence[str]
    ) -> list[ContinuationScore]:
        """Return log-probabilities of continuations; see ``LLM.score``."""
        return await self._ask(await self._in_thread(score_questions, self.requests, texts, continuations))

    async def score_chat(
        self, messages: Sequence[Message], continuations: Sequence[str], **options: Any
    ) -> list[ContinuationScore]:
        """Return the log-probability of each answer to a conversation; see ``LLM.score_chat``."""
        ask = functools.partial(chat_score_questions, self.requests, messages, continuations, **options)
        return await self._ask(await self._in_thread(ask))

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
        return await self._ask(await self._in_thread(rerank_questions, self.requests, *asked))

    async def embed(
        self, prompts: Prompt | Iterable[Prompt], *, pooling: Pooling = "last", normalize: bool = True
    ) -> npt.NDArray[np.float32]:
        """Return embeddings [prompts, hidden_size]; see ``LLM.embed``."""
        check_pooling(pooling)
        listed = listed_prompts(prompts)
        asked = await self._in_thread(lambda: [self.requests.pooled(prompt, pooling) for prompt in listed])
        if not (size := self.engine.info.embedding_size):
            found = await self._in_thread(self.requests.encoder.embed, encoded_tokens(asked), pooling)
            return stacked(*found, normalize=normalize)
        return stacked(await self._ask(embedding_questions(asked)), size, normalize=normalize)

    async def transcribe(
        self,
        audio: Any,
        *,
        cache_salt: str | None = None,
        tenant: str | None = None,
        priority: int = 0,
        **options: Any,
    ) -> AsyncGenerator[Segment | Transcription, None]:
        """Write down a recording; yield each segment when it is finished, and the transcript at the end.

        Args:
            audio: as for ``LLM.transcribe``.
            cache_salt: see ``generate``.
            tenant: see there.
            priority: see there.
            **options: as for ``LLM.transcribe``.

        Raises:
            RequestError: see ``LLM.transcribe``.
            MissingExtraError: see there.
            ProviderRuntimeError: the model failed to run.
            QueueFullError: too many requests are waiting.
        """
        steps = await self._in_thread(self.requests.hearing.steps, audio, options, cache_salt or "")
        options_of_requests = {"priority": priority, "cache_salt": cache_salt, "tenant": tenant}
        answers: list[RequestOutput] | None = None
        while True:
            step = await self._in_thread(next_step, steps, answers)
            answers = None
            if not isinstance(step, Segment | Transcription):
                prompts = [EncodedPrompt(question.token_ids, question.encoder) for question in step]
                params = [question.params for question in step]
                answers = await self._finals(prompts, params, **options_of_requests)
                continue
            yield step
            if isinstance(step, Transcription):
                return

    async def render(self, messages: Sequence[Message], **options: Any) -> ChatPrompt:
        """Render a conversation to a prompt in a thread, without blocking the event loop."""
        return await self._in_thread(self.render_chat, messages, **options)

    async def infill(self, gap: Infill) -> tuple[list[int], tuple[int, ...]]:
        """The prompt of a gap and the tokens that end it; see ``infill_tokens``."""
        return await self._in_thread(self.infill_tokens, gap)

    async def token_ids(
        self, prompt: Prompt, *, add_special_tokens: bool = True, truncate: bool = False
    ) -> list[int]:
        """The tokens of a prompt, while the event loop goes on.

        Args:
            prompt: as for ``generate``; a text may be empty here.
            add_special_tokens: begin a text as the model expects texts to begin.
            truncate: cut a text or a list of tokens to the longest prompt, as for an embedding.

        Raises:
            RequestError: it is no prompt, is too long, or names tokens that do not exist.
        """
        if truncate:
            return await self._in_thread(self.requests.cut_token_ids, prompt)
        if isinstance(prompt, str):
            return await self._in_thread(self.requests.encode, prompt, add_special_tokens=add_special_tokens)
        return await self._in_thread(self.requests.token_ids, prompt)

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
            if self._thread.closed is None:
                raise
            raise EngineClosedError(self._thread.closed) from error
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise raised_in_thread("prepares texts", error) from error

    async def _ask(self, questions: Questions[T]) -> list[T]:
        return questions.read(await self._finals(questions.prompts, questions.params))

    async def _finals(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], **options: Any
    ) -> list[RequestOutput]:
        """Run requests together; return their last states."""
        room = asyncio.Semaphore(self.most_together)

        async def final(prompt: Prompt, params: SamplingParams) -> RequestOutput:
            async with room:
                stream = await self.add_request(prompt, params, **options)
                try:
                    return [output async for output in stream][-1]
                finally:
                    stream.cancel()

        tasks = [asyncio.ensure_future(final(*each)) for each in zip(prompts, params, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if one failed, the others are cancelled
                task.cancel()

    @property
    def most_together(self) -> int:
        """The most requests of one call in progress at a time: half of the queue is left to others."""
        limit = self.engine.config.max_queue
        return sys.maxsize if limit is None else self.engine.info.max_slots + limit // 2

    @property
    def max_loras(self) -> int:
        """The maximum number of resident LoRA adapters; 0 if the model was loaded without."""
        return self.engine.info.max_loras

    def adapter_names(self) -> tuple[list[str], list[str]]:
        """Return the names of the LoRA adapters of running requests, and of waiting ones."""
        return self.engine.adapter_names()

    def stats(self) -> EngineStats:
        """Return counters and gauges of the engine."""
        return self.engine.stats()

    def shutdown(self) -> None:
        """End all requests with EngineClosedError, free the model, and wait for the engine's thread."""
        atexit.unregister(self.shutdown)
        self._thread.close()
        self._text_threads.shutdown(wait=False)
        self.requests.encoder.close()
