"""Requests of one language model: takes requests and yields deltas, for every transport."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import field
from typing import Any, Protocol

from ....errors import (
    EngineClosedError,
    QueueFullError,
    RequestError,
    ServiceUnavailableError,
    UnsupportedTaskError,
    UsageError,
)
from ....records import dataclass
from ...api.async_llm import AsyncLLM
from ...api.embedding import Input, Pooling, text_inputs
from ...api.request_stream import RequestStream
from ...api.requests import RENDER_OPTIONS
from ...api.requests import Prompt as EnginePrompt
from ...api.scoring import RERANK_INSTRUCTION, ContinuationScore
from ...audio.transcription import Segment, Transcription
from ...engine.stats import EngineStats
from ...text.chat_template import check_variables
from ...text.infill import Infill
from ...types.outputs import RequestMetrics
from .caller import CALLER, caller_name, check_tokens, spend
from .chat import Conversation
from .fetching import PictureFetcher
from .messages import Delta, Embeddings, Generation, GenerationRequest, ModelInfo, Prompt, with_gap
from .request_context import promise
from .served_model import ServedModel


class RequestObserver(Protocol):
    """Follows one request."""

    def delta(self, delta: Delta, metrics: RequestMetrics | None) -> None:
        """Record a delta of the request."""

    def ended(self, error: BaseException | None) -> None:
        """Record the end of the request, and the error or cancellation that ended it."""


class Observer(Protocol):
    """Follows all requests of a service."""

    def begin(self, model: str, request: GenerationRequest) -> RequestObserver | None:
        """Record that a request was accepted, and return its observer; None if it needs none."""


class Observers:
    """Passes everything to each of several observers."""

    def __init__(self) -> None:
        self._all: list[Observer] = []

    def add(self, observer: Observer) -> None:
        """Add an observer of the requests that begin from now on."""
        self._all.append(observer)

    def begin(self, model: str, request: GenerationRequest) -> RequestObserver | None:
        begun = [observer.begin(model, request) for observer in self._all]
        found = [one for one in begun if one is not None]
        return found[0] if len(found) == 1 else _Several(found) if found else None


class _Several:
    """The observers of one request."""

    def __init__(self, each: list[RequestObserver]) -> None:
        self._each = each

    def delta(self, delta: Delta, metrics: RequestMetrics | None) -> None:
        for one in self._each:
            one.delta(delta, metrics)

    def ended(self, error: BaseException | None) -> None:
        for one in self._each:
            one.ended(error)


LOADING = "the model is still loading; retry later"
STOPPING = "the service is shutting down; retry elsewhere"
CUT_OFF = "the service was shut down before the request was finished; retry elsewhere"
_ERROR_SECONDS = 0.5
PROGRESS_SECONDS = 0.5  # between two reports of a prompt's progress


@dataclass(slots=True)
class _Requests:
    """The requests of one loaded model.

    Attributes:
        model: None while it loads.
        refusal: why requests are refused; None accepts them.
        mean_seconds: mean duration of a request, queueing included.
        active: the number of requests in progress.
        last_ended: when the latest one ended, in seconds of ``time.monotonic``.
        streams: those that generate, with the name of the API key.
        idle: set while none is in progress.
    """

    model: ServedModel | None = None
    refusal: str | None = LOADING
    mean_seconds: float = 1.0
    active: int = 0
    last_ended: float = 0.0
    streams: dict[RequestStream, str | None] = field(default_factory=dict)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()


class LLMHandler:
    """Serves requests with one engine, from `ready` until `drain`. Use it in one event loop only.

    Args:
        on_engine_lost: called when a request fails because the engine is closed.
        observers: observes the requests.
        fetcher: fetches pictures that a request gives by their address.

    Attributes:
        lora: the LoRA adapter of its requests; None is the base model.
    """

    def __init__(
        self,
        on_engine_lost: Callable[[], None] = lambda: None,
        observers: Observer | None = None,
        fetcher: PictureFetcher | None = None,
    ) -> None:
        self.lora: str | None = None
        self.requests = _Requests()
        self._fetcher = fetcher or PictureFetcher()
        self._on_engine_lost = on_engine_lost
        self._observers = observers

    def adapted(self, lora: str) -> LLMHandler:
        """Return a view that answers with a LoRA adapter, under its name; both count the same requests."""
        view = copy.copy(self)
        view.lora = lora
        return view

    def ready(self, model: ServedModel) -> None:
        """Accept requests from now on."""
        self.requests.model = model
        self.requests.refusal = None

    @property
    def served(self) -> ServedModel:
        """The model that is served.

        Raises:
            ServiceUnavailableError: the model is still loading.
        """
        model = self.requests.model
        if model is None:
            raise ServiceUnavailableError(LOADING)
        return model

    @property
    def llm(self) -> AsyncLLM:
        """The engine of the model; see ``served`` for errors."""
        return self.served.llm

    @property
    def info(self) -> ModelInfo:
        """Public facts of the model; with an adapter, under the adapter's name."""
        info = self.served.info
        return info if self.lora is None else dataclasses.replace(info, model=self.lora)

    @property
    def name(self) -> str:
        """The name of the model or of the adapter."""
        return self.lora or self.served.info.model

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The model's default sampling options."""
        return self.served.defaults

    @property
    def active(self) -> int:
        """Return the number of requests in progress."""
        return self.requests.active

    @property
    def last_ended(self) -> float:
        """Return when the latest request ended, in seconds of ``time.monotonic``."""
        return self.requests.last_ended

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yield the continuation as it grows. Closing the generator cancels the request.

        Raises:
            ServiceUnavailableError: the model is loading, or the service is shutting down.
            RequestError: the request is invalid.
            QueueFullError: too many requests are waiting.
            EngineClosedError: the engine was shut down during the request.
            ProviderRuntimeError: the model failed to run.
        """
        check_tokens()
        with self._in_progress() as llm:
            if isinstance(request.prompt, Infill):
                request = with_gap(request, *await llm.infill(request.prompt))
            stream = await llm.add_request(
                await self._prompt(llm, request.prompt, request.cache_salt or ""),
                request.params,
                request.request_id,
                request.priority,
                request.cache_salt,
                request.tenant,
                request.timeout,
                self.lora or request.lora,
                request.pin_seconds,
            )
            self.requests.streams[stream] = caller_name()
            start = time.monotonic()
            observer = self._observers.begin(self.name, request) if self._observers else None
            failure: BaseException | None = None
            try:
                metrics = stream.group.requests[0].metrics
                if await stream.accepted():
                    opening = _opening(stream, with_tokens=request.return_token_ids)
                    spend(opening.prompt_tokens)
                    promise(stream.group.requests[0].expected_seconds)
                    if observer is not None:
                        observer.delta(opening, None)
                    yield opening
                    if request.return_progress:
                        async for count in stream.prefilling(PROGRESS_SECONDS):
                            yield _progress(stream, count)
                async for deltas in stream.deltas(request.stream_interval):
                    if (wrong := stream.group.failure) is not None:
                        raise wrong
                    for delta in deltas:
                        spend(len(delta.token_ids))
                        if observer is not None:
                            observer.delta(delta, metrics)
                        yield delta
                self.requests.mean_seconds += (time.monotonic() - start - self.requests.mean_seconds) / 8
            except QueueFullError as error:
                stats = llm.stats()
                waiting = self.requests.mean_seconds * stats.waiting / max(1, stats.slots)
                error.retry_after = error.retry_after or waiting
                observer = None  # the engine did not accept the request
                raise
            except BaseException as error:
                failure = error
                raise
            finally:
                self.requests.streams.pop(stream, None)
                stream.cancel()
                if observer is not None:
                    observer.ended(failure)

    async def complete(self, request: GenerationRequest) -> Generation:
        """Return all continuations of a request when they have ended.

        Raises:
            RequestCancelled: the request was cancelled, or its timeout has passed.
            CarryallError: see ``generate``.
        """
        async with aclosing(self.generate(request)) as deltas:
            return Generation.of([delta async for delta in deltas])

    async def transcribe(
        self, audio: bytes, options: Mapping[str, Any], *, priority: int = 0
    ) -> AsyncGenerator[Segment | Transcription, None]:
        """Yield the segments of a recording as they are finished, and the transcript at the end.

        Args:
            audio: a file of sound.
            options: fields of ``TranscriptionOptions``.
            priority: see ``AsyncLLM.generate``.

        Raises:
            UnsupportedTaskError: the model is a LoRA adapter.
            RequestError: the model hears nothing, the file cannot be read, or an option is invalid.
            ServiceUnavailableError: see ``generate``.
        """
        self._refuse_adapter("transcripts")
        check_tokens()
        name = caller_name()
        with self._in_progress() as llm:
            shared: dict[str, Any] = {"cache_salt": name, "tenant": name, "priority": priority}
            async with aclosing(llm.transcribe(audio, **shared, **options)) as parts:
                async for part in parts:
                    if isinstance(part, Transcription):
                        spend(part.num_tokens)
                    yield part

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            prompt: a text, token ids, or a conversation, which the chat template renders.
            add_special_tokens: add the tokenizer's special tokens to a text, such as BOS.

        Raises:
            RequestError: the prompt is invalid, or the model has no tokenizer.
            ServiceUnavailableError: see ``generate``.
        """
        with self._in_progress() as llm:
            ready = await self._prompt(llm, prompt)
            return await llm.token_ids(ready, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids.

        Raises:
            RequestError: a token id is not in the vocabulary.
            ServiceUnavailableError: see ``generate``.
        """
        with self._in_progress() as llm:
            return await llm.text_of(token_ids, skip_special_tokens=skip_special_tokens)

    async def embed(
        self,
        prompts: Sequence[Input],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        prompt: str | None = None,
        truncate: bool | None = None,
        late_chunking: bool = False,
    ) -> Embeddings:
        """Return the embeddings of texts or token ids.

        Args:
            prompts: the texts or token ids.
            pooling: None is "last".
            normalize: whether to scale vectors to length 1.
            prompt: must be None, because a decoder has no prompts by name.
            truncate: whether to cut texts that are longer than the context, instead of refusing them.
            late_chunking: must be False, because only encoders read a document in pieces.

        Raises:
            RequestError: a prompt is invalid, or the name of a prompt is given.
            UnsupportedTaskError: the model cannot compute embeddings, or not in pieces.
            ServiceUnavailableError: see ``generate``.
        """
        self._refuse_adapter("embeddings")
        if prompt is not None:
            raise RequestError(f"the model '{self.name}' has no prompts by name; omit 'prompt_name'")
        if late_chunking:
            raise UnsupportedTaskError(f"the model '{self.name}' has no late chunking; encoders have it")
        with self._in_progress() as llm:
            check_tokens()
            texts = text_inputs(prompts)
            tokens = [await llm.token_ids(text, truncate=bool(truncate)) for text in texts]
            spend(sum(map(len, tokens)))
            try:
                vectors = await llm.embed(tokens, pooling=pooling or "last", normalize=normalize)
            except UsageError as error:
                if isinstance(error, RequestError):
                    raise
                raise UnsupportedTaskError(str(error)) from error
        return Embeddings(vectors, sum(map(len, tokens)))

    async def score(
        self, texts: str | Sequence[str] | Conversation, continuations: str | Sequence[str]
    ) -> list[ContinuationScore]:
        """Return the log-probability of each continuation; see ``LLM.score`` and ``LLM.score_chat``."""
        self._refuse_adapter("scores")
        with self._in_progress() as llm:
            if isinstance(texts, Conversation):
                check_variables(texts.variables, RENDER_OPTIONS)
                await _spend_on(llm, continuations)
                return await llm.score_chat(
                    (await self._seen(texts)).turns(),
                    [continuations] if isinstance(continuations, str) else continuations,
                    tools=texts.tools or None,
                    continue_final_message=texts.continues,
                    **texts.variables,
                )
            await _spend_on(llm, texts, continuations)
            return await llm.score(texts, continuations)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str = RERANK_INSTRUCTION,
        answers: Sequence[str] = ("yes", "no"),
        truncate: bool | None = None,
        raw: bool = False,
    ) -> list[float]:
        """Return the probability that each document answers the query; see ``LLM.rerank``.

        Raises:
            UnsupportedTaskError: ``raw`` is True; a language model has no logit of a pair.
            RequestError: ``truncate`` is True, which would cut the question behind the document.
        """
        if truncate:
            raise RequestError(
                f"the model '{self.name}' asks a question behind each document; omit 'truncate'"
            )
        if raw:
            raise UnsupportedTaskError(
                f"the model '{self.name}' is a language model; it has no logit of a pair"
            )
        self._refuse_adapter("reranking")
        with self._in_progress() as llm:
            await _spend_on(llm, [query] * len(documents), documents)
            return await llm.rerank(query, documents, instruction=instruction, answers=answers)

    def abort(self, request_id: str) -> None:
        """Cancel a request of the same caller; its last delta has finish_reason "cancelled"."""
        for stream, owner in self.requests.streams.items():
            if stream.group.request_id == request_id and owner == caller_name():
                self.llm.abort(request_id)

    def end_thought(self, request_id: str) -> bool:
        """End the thought of a request of the same caller; return whether it is in one that can be ended."""
        for stream, owner in self.requests.streams.items():
            if stream.group.request_id == request_id and owner == caller_name():
                thoughts = [request.sampling.thought for request in stream.group.requests]
                self.llm.end_thought(request_id)
                return any(thought is not None and thought.thinks for thought in thoughts)
        return False

    def stats(self) -> EngineStats:
        """Return the engine's counters and gauges.

        Raises:
            ServiceUnavailableError: the model is loading.
        """
        return self.llm.stats()

    async def drain(self, grace_seconds: float) -> bool:
        """Refuse new requests, wait for those in progress, and end the remaining ones with an error.

        Returns:
            Whether all requests ended within ``grace_seconds``.
        """
        self.requests.refusal = STOPPING
        try:
            await asyncio.wait_for(self.requests.idle.wait(), grace_seconds)
        except TimeoutError:
            for stream in self.requests.streams:
                stream.fail(ServiceUnavailableError(CUT_OFF))
            with suppress(TimeoutError):  # time for clients to read the errors
                await asyncio.wait_for(self.requests.idle.wait(), _ERROR_SECONDS)
            return False
        return True

    async def _prompt(self, llm: AsyncLLM, prompt: Prompt, salt: str = "") -> EnginePrompt:
        """Return a prompt in the engine's form; a conversation is rendered, and its pictures are computed.

        Args:
            llm: the model.
            prompt: of a request.
            salt: see ``RequestFactory.chat_prompt``.
        """
        if isinstance(prompt, Infill):
            return (await llm.infill(prompt))[0]
        if not isinstance(prompt, Conversation):
            return prompt
        check_variables(prompt.variables, RENDER_OPTIONS)
        return await llm.render(
            (await self._seen(prompt)).turns(),
            tools=prompt.tools or None,
            continue_final_message=prompt.continues,
            called=prompt.called,
            parallel_calls=prompt.parallel_calls,
            cache_salt=salt,
            **prompt.variables,
        )

    async def _seen(self, conversation: Conversation) -> Conversation:
        """Return a conversation with the pictures that it gives by addresses, if the model sees.

        Raises:
            RequestError: see ``PictureFetcher.fetch``.
        """
        return await self._fetcher.filled(conversation) if self.info.reads_images else conversation

    def _refuse_adapter(self, what: str) -> None:
        """Check that no adapter is asked for what only a base model has.

        Raises:
            UnsupportedTaskError: one is.
        """
        if self.lora is not None:
            model = self.requests.model
            base = "" if model is None else f" '{model.info.model}'"
            raise UnsupportedTaskError(
                f"'{self.lora}' is a LoRA adapter, which has no {what}; name its base model{base}"
            )

    @contextmanager
    def _in_progress(self) -> Iterator[AsyncLLM]:
        if self.requests.refusal is not None:
            raise ServiceUnavailableError(self.requests.refusal)
        self.requests.active += 1
        self.requests.idle.clear()
        try:
            yield self.llm
        except EngineClosedError:
            self._on_engine_lost()
            raise
        finally:
            self.requests.active -= 1
            self.requests.last_ended = time.monotonic()
            if not self.requests.active:
                self.requests.idle.set()


def _opening(stream: RequestStream, *, with_tokens: bool) -> Delta:
    """Return the delta that tells that a request is queued."""
    group, tokens = stream.group, stream.group.requests[0].prompt_token_ids
    return Delta(
        request_id=group.request_id,
        index=0,
        prompt_tokens=len(tokens),
        prompt_token_ids=tokens if with_tokens else (),
    )


def _progress(stream: RequestStream, count: int) -> Delta:
    """Return the delta that tells that ``count`` tokens of a prompt are computed."""
    request = stream.group.requests[0]
    return Delta(
        request_id=stream.group.request_id,
        index=0,
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=request.metrics.cached_tokens,
        computed_prompt_tokens=count,
    )


async def _spend_on(llm: AsyncLLM, *groups: str | Sequence[str]) -> None:
    """Count the tokens of texts, without the prompt around them, if the caller's tokens are limited."""
    caller = CALLER.get()
    if caller is None or not caller.budgets.counts_tokens:
        return
    check_tokens()
    for texts in groups:
        for text in [texts] if isinstance(texts, str) else texts:
            spend(len(await llm.token_ids(text)))
