"""The client for threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc

from ..proto import generation_pb2, models_pb2, service_pb2_grpc, tasks_pb2
from . import calls
from .calls import Call, Pooling
from .connection import TLS, call_metadata, channel_options, checked_attempts
from .errors import own_errors
from .options import Options
from .requests import Message, Prompt, chat_request, generate_request
from .results import Answer, Completion, Reply, answered, generated

T = TypeVar("T")


class Client:
    """Calls a server's `carryall.v1.GenerationService`. Thread-safe.

    A call that fails raises the error that the service met: RequestError, UnknownModelError,
    UnsupportedTaskError, QueueFullError, ServiceUnavailableError, RequestCancelled, AccessError,
    CallTimeoutError, or else RequestFailedError.

    Args:
        target: ``host:port``, or another target of gRPC such as ``unix:/run/carryall.sock``.
        model: the model of calls that name none; empty takes the server's only or default model.
        tls: None connects without encryption.
        api_key: sent with every call.
        timeout: seconds that a call may take, its retries included; None is no limit.
        attempts: how often a call is sent at most, from 1 to 5. It is repeated only if the server is not
            reached, is loading or stopping, or its queue is full, and only before its first message arrived.
        max_message_bytes: largest message sent or taken.
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
            grpc.insecure_channel(target, options)
            if tls is None
            else grpc.secure_channel(target, tls.credentials(), options)
        )
        self._stub: Any = service_pb2_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._model, self._timeout = model, timeout
        self._metadata = call_metadata(api_key)

    def close(self) -> None:
        """Close the connection; running calls end as cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Iterator[generation_pb2.GenerateResponse]:
        """Yield the parts of a prompt's continuation as they are generated; closing the iterator cancels it.

        Args:
            prompt: a text, or token ids with special tokens included.
            model: None takes the client's.
            timeout: None takes the client's.
            **options: see ``Options``.
        """
        return self._parts(self._stub.Generate, generate_request(self._name(model), prompt, options), timeout)

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Reply[Completion]:
        """Continue a prompt; see ``stream``."""
        return generated(list(self.stream(prompt, model=model, timeout=timeout, **options)))

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
    ) -> Iterator[generation_pb2.ChatResponse]:
        """Yield the parts of the next turn in a conversation; closing the iterator cancels the request.

        Args:
            messages: each with a ``role`` and a ``content``, as in OpenAI's API.
            tools: functions that the model may call, as in OpenAI's API.
            tool_choice: "auto", "none", "required", or ``{"function": {"name": ...}}``.
            template_variables: further variables of the chat template.
            model: None takes the client's.
            timeout: None takes the client's.
            **options: see ``Options``.
        """
        request = chat_request(self._name(model), messages, tools, tool_choice, template_variables, options)
        return self._parts(self._stub.Chat, request, timeout)

    def chat(
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
        """The next turn in a conversation; see ``stream_chat``."""
        parts = self.stream_chat(
            messages,
            tools=tools,
            tool_choice=tool_choice,
            template_variables=template_variables,
            model=model,
            timeout=timeout,
            **options,
        )
        return answered(list(parts))

    def embed(
        self,
        inputs: Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        model: str | None = None,
        timeout: float | None = None,
    ) -> list[list[float]]:
        """One vector for each input; ``normalize`` scales each to length 1."""
        return self._unary(calls.embed(self._name(model), inputs, pooling, normalize), timeout)

    def score(
        self, pairs: Iterable[tuple[str, str]], *, model: str | None = None, timeout: float | None = None
    ) -> list[tasks_pb2.ContinuationScore]:
        """How likely each continuation is, for pairs of a text and its continuation."""
        return self._unary(calls.score(self._name(model), pairs), timeout)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int = 0,
        instruction: str = "",
        model: str | None = None,
        timeout: float | None = None,
    ) -> list[tasks_pb2.RankedDocument]:
        """The documents that answer a query best, best first; 0 as ``top_n`` returns all."""
        return self._unary(calls.rerank(self._name(model), query, documents, top_n, instruction), timeout)

    def tokenize(
        self,
        text: str | Iterable[Message],
        *,
        tools: Iterable[Mapping[str, Any]] = (),
        add_special_tokens: bool = True,
        model: str | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """The tokens of a text, or of a conversation as the model's chat template writes it."""
        return self._unary(calls.tokenize(self._name(model), text, tools, add_special_tokens), timeout)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        model: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """The text of tokens."""
        return self._unary(calls.detokenize(self._name(model), token_ids, skip_special_tokens), timeout)

    def models(self, *, timeout: float | None = None) -> list[models_pb2.Model]:
        """All models of the server, loaded or not."""
        return self._unary(calls.models(), timeout)

    def load(self, model: str, *, timeout: float | None = None) -> models_pb2.Model:
        """Load a model and return once it accepts requests."""
        return self._unary(calls.load(model), timeout)

    def unload(self, model: str, *, timeout: float | None = None) -> None:
        """Unload a model."""
        return self._unary(calls.unload(model), timeout)

    def stats(self, model: str = "", *, timeout: float | None = None) -> list[models_pb2.EngineStats]:
        """Counters and gauges of one model, or of all loaded models."""
        return self._unary(calls.stats(model), timeout)

    def _name(self, model: str | None) -> str:
        return self._model if model is None else model

    def _unary(self, call: Call[T], timeout: float | None) -> T:
        method = getattr(self._stub, call.method)
        with own_errors():
            return call.read(method(call.request, timeout=self._seconds(timeout), metadata=self._metadata))

    def _parts(self, method: Any, request: Any, timeout: float | None) -> Iterator[Any]:
        call = method(request, timeout=self._seconds(timeout), metadata=self._metadata)
        try:
            with own_errors():
                yield from call
        finally:
            call.cancel()  # does nothing to a call that has ended

    def _seconds(self, timeout: float | None) -> float | None:
        return self._timeout if timeout is None else timeout
