"""The client for asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc

from ..proto import generation_pb2, models_pb2, service_pb2_grpc, tasks_pb2
from . import calls
from .calls import Call, Pooling
from .connection import TLS, call_metadata, channel_options, checked_attempts
from .errors import own_errors
from .options import ClassifyOptions, Options, TextOptions
from .requests import EmbedPrompt, Message, Prompt, chat_request, generate_request
from .results import Answer, Completion, Reply, answered, generated

T = TypeVar("T")


class AsyncClient:
    """Calls a server's `carryall.v1.GenerationService` within one event loop.

    The methods are those of ``Client``, as coroutines. Streams are async generators; ``aclose()`` cancels the
    request. A failed call raises the same errors as ``Client``.

    Args:
        target: see ``Client``.
        model: see ``Client``.
        tls: see ``Client``.
        api_key: see ``Client``.
        timeout: see ``Client``.
        attempts: see ``Client``.
        max_message_bytes: see ``Client``.
    """

    def __init__(
        self,
        target: str,
        *,
        model: str = "",
        tls: TLS | None = None,
        api_key: str | None = None,
        timeout: float | None = None,
        attempts: int = 4,
        max_message_bytes: int = 16 * 2**20,
    ) -> None:
        options = channel_options(checked_attempts(attempts), max_message_bytes, tls)
        self._channel = (
            grpc.aio.insecure_channel(target, options)
            if tls is None
            else grpc.aio.secure_channel(target, tls.credentials(), options)
        )
        self._stub: Any = service_pb2_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._model, self._timeout = model, timeout
        self._metadata = call_metadata(api_key)

    async def close(self) -> None:
        """Close the connection; running calls end as cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield the parts of a prompt's continuation during generation; ``aclose()`` cancels the request.

        Args:
            prompt: a text, or token ids with special tokens included.
            model: the model name; None takes the client's default.
            timeout: seconds; None takes the client's default.
            **options: see ``Options``.
        """
        return self._parts(self._stub.Generate, generate_request(self._name(model), prompt, options), timeout)

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Reply[Completion]:
        """Return the continuation of a prompt; see ``stream``."""
        return generated(
            [part async for part in self.stream(prompt, model=model, timeout=timeout, **options)]
        )

    def stream_chat(
        self,
        messages: Iterable[Message],
        *,
        tools: Iterable[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[generation_pb2.ChatResponse, None]:
        """Yield the parts of the next turn in a conversation; ``aclose()`` cancels the request.

        Args:
            messages: each with a ``role`` and a ``content``, as in OpenAI's API.
            tools: functions that the model may call, as in OpenAI's API.
            tool_choice: "auto", "none", "required", or ``{"function": {"name": ...}}``.
            template_variables: further variables of the chat template.
            model: the model name; None takes the client's default.
            timeout: seconds; None takes the client's default.
            **options: see ``Options``.
        """
        request = chat_request(self._name(model), messages, tools, tool_choice, template_variables, options)
        return self._parts(self._stub.Chat, request, timeout)

    async def chat(
        self,
        messages: Iterable[Message],
        *,
        tools: Iterable[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Reply[Answer]:
        """Return the next turn in a conversation; see ``stream_chat``."""
        parts = self.stream_chat(
            messages,
            tools=tools,
            tool_choice=tool_choice,
            template_variables=template_variables,
            model=model,
            timeout=timeout,
            **options,
        )
        return answered([part async for part in parts])

    async def embed(
        self,
        inputs: Sequence[EmbedPrompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        dimensions: int = 0,
        late_chunking: bool = False,
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[TextOptions],
    ) -> list[list[float]]:
        """Return one vector for each input.

        Args:
            inputs: texts, lists of token ids, or pictures: {"image": the bytes of a file}.
            pooling: of a language model; an encoder has its own.
            normalize: scale each vector to length 1.
            dimensions: how many of the first elements to keep; 0 keeps all.
            late_chunking: the inputs are pieces of one document, which an encoder reads whole.
            model: the name of the model; None takes that of the client.
            timeout: seconds; None takes those of the client.
            options: see ``TextOptions``.
        """
        call = calls.embed(self._name(model), inputs, pooling, normalize, dimensions, late_chunking, options)
        return await self._unary(call, timeout)

    async def embed_sparse(
        self,
        inputs: Sequence[Prompt],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[TextOptions],
    ) -> list[tasks_pb2.SparseEmbedding]:
        """Return the elements of each input's sparse vector that are not 0."""
        return await self._unary(calls.embed_sparse(self._name(model), inputs, options), timeout)

    async def embed_tokens(
        self,
        inputs: Sequence[Prompt],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[TextOptions],
    ) -> list[list[list[float]]]:
        """Return a vector of each token of each input, by a model for late interaction."""
        return await self._unary(calls.embed_tokens(self._name(model), inputs, options), timeout)

    async def classify(
        self,
        texts: Iterable[str | tuple[str, str]],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> list[tasks_pb2.Classification]:
        """Return the labels of texts or pairs, best first, or the parts that a classifier of tokens finds."""
        return await self._unary(calls.classify(self._name(model), texts, options), timeout)

    async def score(
        self, pairs: Iterable[tuple[str, str]], *, model: str | None = None, timeout: float | None = None
    ) -> list[tasks_pb2.ContinuationScore]:
        """Return the log-probability of each continuation, for pairs of a text and its continuation."""
        return await self._unary(calls.score(self._name(model), pairs), timeout)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int = 0,
        instruction: str = "",
        truncate: bool | None = None,
        raw_scores: bool = False,
        model: str | None = None,
        timeout: float | None = None,
    ) -> list[tasks_pb2.RankedDocument]:
        """Return the ``top_n`` documents that answer a query best, best first; 0 returns all."""
        call = calls.rerank(self._name(model), query, documents, top_n, instruction, truncate, raw_scores)
        return await self._unary(call, timeout)

    async def tokenize(
        self,
        text: str | Iterable[Message],
        *,
        tools: Iterable[Mapping[str, Any]] = (),
        add_special_tokens: bool = True,
        model: str | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Return the token ids of a text, or of a conversation rendered by the model's chat template."""
        return await self._unary(calls.tokenize(self._name(model), text, tools, add_special_tokens), timeout)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        model: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """Return the text of token ids."""
        return await self._unary(calls.detokenize(self._name(model), token_ids, skip_special_tokens), timeout)

    async def models(self, *, timeout: float | None = None) -> list[models_pb2.Model]:
        """Return all models of the server, loaded or not."""
        return await self._unary(calls.models(), timeout)

    async def load(self, model: str, *, timeout: float | None = None) -> models_pb2.Model:
        """Load a model, and return it when it accepts requests."""
        return await self._unary(calls.load(model), timeout)

    async def unload(self, model: str, *, timeout: float | None = None) -> None:
        """Unload a model."""
        return await self._unary(calls.unload(model), timeout)

    async def stats(self, model: str = "", *, timeout: float | None = None) -> list[models_pb2.EngineStats]:
        """Return counters and gauges of one model, or of all loaded models."""
        return await self._unary(calls.stats(model), timeout)

    def _name(self, model: str | None) -> str:
        return self._model if model is None else model

    async def _unary(self, call: Call[T], timeout: float | None) -> T:
        method = getattr(self._stub, call.method)
        with own_errors():
            answer = await method(call.request, timeout=self._seconds(timeout), metadata=self._metadata)
        return call.read(answer)

    async def _parts(self, method: Any, request: Any, timeout: float | None) -> AsyncGenerator[Any, None]:
        call = method(request, timeout=self._seconds(timeout), metadata=self._metadata)
        try:
            with own_errors():
                async for part in call:
                    yield part
        finally:
            call.cancel()  # has no effect on a finished call

    def _seconds(self, timeout: float | None) -> float | None:
        return self._timeout if timeout is None else timeout
