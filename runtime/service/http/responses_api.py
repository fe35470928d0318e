"""OpenAI's endpoints ``/v1/responses``: create, stream, retrieve, compact, cancel and delete."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from ....errors import CarryallError, RequestError
from ..core.caller import caller_name
from ..core.deltas import refuse_cancelled
from ..core.handler import LLMHandler
from .errors import described
from .middleware import enter_caller
from .openai import compaction
from .openai.reading import text_field
from .openai.response_store import ResponseStore, StoredResponse
from .openai.responses import KNOWN, ResponseAsk, ResponseBuilder, read_response
from .responses_socket import ResponsesSocket, Turn
from .service import HttpService, json_response, service_of
from .sse import event, streamed, while_connected

Json = dict[str, Any]


class ResponsesApi:
    """The endpoints and the store of their responses.

    Args:
        service: the models and settings.
    """

    def __init__(self, service: HttpService) -> None:
        self._store = ResponseStore(service.config.max_stored_responses)

    async def create(self, request: Request) -> Response:
        """Handle ``POST /v1/responses``: create a response."""
        service = service_of(request)
        body, headers = await service.known_body(request, KNOWN)
        handler = service.llm(request, body.get("model"))
        ask = self._read(service, handler, body)
        builder = ResponseBuilder(ask, handler.model.info.model)
        if ask.background:
            return json_response(self._in_background(handler, ask, builder, caller_name()), headers)
        if ask.stream:
            groups = self._events(handler, ask, builder, caller_name())

            def late(error: Exception) -> bytes:
                return _event_bytes(builder.end_with("failed", _error(error)))

            return streamed(request, _as_bytes(groups), headers=headers, late_error=late)
        await while_connected(request.receive, self._run(handler, ask, builder))
        self._keep(ask, builder, caller_name())
        return json_response(builder.response, headers)

    async def compact(self, request: Request) -> Response:
        """Handle ``POST /v1/responses/compact``: summarize a conversation in one item."""
        service = service_of(request)
        body, headers = await service.known_body(request, compaction.KNOWN)
        body = compaction.summary_body(body)
        handler = service.llm(request, body["model"])
        ask = self._read(service, handler, body)
        builder = ResponseBuilder(ask, handler.model.info.model)
        await while_connected(request.receive, self._run(handler, ask, builder))
        return json_response(compaction.compacted(builder.response), headers)

    async def connect(self, socket: WebSocket) -> None:
        """Handle a WebSocket at ``/v1/responses``."""
        await socket.accept()
        await ResponsesSocket(socket, _SocketTurns(self, socket)).run()

    def start(self, socket: WebSocket, body: Json, own: ResponseStore) -> Turn:
        """Start a turn of a WebSocket; ``own`` holds the last response of the connection."""
        service = service_of(socket)
        body, _ = service.split(body, KNOWN)
        handler = service.llm(socket, body.get("model"))
        ask = self._read(service, handler, body, own)
        builder = ResponseBuilder(ask, handler.model.info.model)
        return Turn(
            self._events(handler, ask, builder, caller_name(), own),
            lambda error: builder.end_with("failed", _error(error)),
        )

    def _read(
        self, service: HttpService, handler: LLMHandler, body: Json, own: ResponseStore | None = None
    ) -> ResponseAsk:
        before: list[Json] = []
        if (previous := text_field("previous_response_id", body.get("previous_response_id"))) is not None:
            store = own if own is not None and previous in own else self._store
            before = store.get(previous, caller_name()).turns
        read = read_response(body, handler.model.defaults, before)
        return dataclasses.replace(read, request=service.admission.admitted(read.request))

    async def _run(self, handler: LLMHandler, ask: ResponseAsk, builder: ResponseBuilder) -> None:
        async with aclosing(handler.generate(ask.request)) as deltas:
            async for delta in deltas:
                refuse_cancelled(delta)
                for _ in builder.of(delta):
                    pass

    async def _events(
        self,
        handler: LLMHandler,
        ask: ResponseAsk,
        builder: ResponseBuilder,
        owner: str | None,
        own: ResponseStore | None = None,
    ) -> AsyncGenerator[list[Json], None]:
        first = list(builder.begin())
        async with aclosing(handler.generate(ask.request)) as deltas:
            async for delta in deltas:
                refuse_cancelled(delta)
                events = [*first, *builder.of(delta)]
                first = []
                if delta.usage is not None:  # store it before the client can request it by id
                    self._keep(ask, builder, owner, own)
                yield events

    def _keep(
        self, ask: ResponseAsk, builder: ResponseBuilder, owner: str | None, own: ResponseStore | None = None
    ) -> None:
        stored = StoredResponse(builder.response, [*ask.turns, *builder.turns()], ask.items, owner)
        if ask.store:
            self._store.add(stored)
        if own is not None:
            own.add(stored)

    def _in_background(
        self, handler: LLMHandler, ask: ResponseAsk, builder: ResponseBuilder, owner: str | None
    ) -> Json:
        stored = StoredResponse(builder.response, ask.turns, ask.items, owner)

        async def work() -> None:
            try:
                await self._run(handler, ask, builder)
                stored.turns = [*ask.turns, *builder.turns()]
            except asyncio.CancelledError:
                builder.end_with("cancelled")
                raise
            except CarryallError as error:
                builder.end_with("failed", _error(error))

        stored.task = asyncio.create_task(work())
        self._store.add(stored)
        return builder.response

    async def retrieve(self, request: Request) -> Response:
        """Handle ``GET /v1/responses/{id}``: return a stored response."""
        return json_response(self._stored(request).response)

    async def items(self, request: Request) -> Response:
        """Handle ``GET /v1/responses/{id}/input_items``: return the input of a stored response."""
        items = self._stored(request).items
        return json_response({"object": "list", "data": items, "has_more": False})

    async def cancel(self, request: Request) -> Response:
        """Handle ``POST /v1/responses/{id}/cancel``: cancel a background response."""
        stored = self._stored(request)
        if stored.task is None:
            raise RequestError("only responses created with 'background': true can be cancelled")
        stored.task.cancel()
        await asyncio.wait([stored.task])
        return json_response(stored.response)

    async def delete(self, request: Request) -> Response:
        """Handle ``DELETE /v1/responses/{id}``: delete a stored response."""
        name = request.path_params["id"]
        self._store.remove(name, caller_name())
        return json_response({"id": name, "object": "response", "deleted": True})

    def _stored(self, request: Request) -> StoredResponse:
        return self._store.get(request.path_params["id"], caller_name())


class _SocketTurns:
    """The turns of one WebSocket; see ``Turns``. It keeps the last response, whether stored or not."""

    def __init__(self, api: ResponsesApi, socket: WebSocket) -> None:
        self._api, self._socket = api, socket
        self._policy = service_of(socket).admission.policy
        self._own = ResponseStore(1)

    def start(self, body: Json) -> Turn:
        enter_caller(self._policy.keys, self._socket.headers)  # the key may have been removed since
        return self._api.start(self._socket, body, self._own)

    def forget(self, previous: Any) -> None:
        self._own.drop(previous)


async def _as_bytes(groups: AsyncGenerator[list[Json], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(groups):
        async for events in groups:
            yield b"".join(map(_event_bytes, events))


def _event_bytes(one: Json) -> bytes:
    return event(one, one["type"])


def _error(error: Exception) -> Json:
    status, message, code = described(error)
    codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
    return {"code": code or codes.get(status, "server_error"), "message": message}


def routes(service: HttpService) -> list[BaseRoute]:
    """Return the routes."""
    api = ResponsesApi(service)
    return [
        Route("/v1/responses", api.create, methods=["POST"]),
        WebSocketRoute("/v1/responses", api.connect),
        Route("/v1/responses/compact", api.compact, methods=["POST"]),
        Route("/v1/responses/{id}", api.retrieve),
        Route("/v1/responses/{id}", api.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", api.items),
        Route("/v1/responses/{id}/cancel", api.cancel, methods=["POST"]),
    ]
