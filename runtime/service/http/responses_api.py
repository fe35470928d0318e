"""OpenAI's endpoints ``/v1/responses``: create, stream, retrieve, compact, cancel and delete."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from ....errors import CarryallError, RequestError
from ....options import shown
from ...process.faults import log_fault
from ..core.caller import caller_name
from ..core.chat import Message
from ..core.handler import LLMHandler
from ..core.messages import refuse_cancelled
from .errors import described
from .middleware import enter_caller
from .openai import compaction
from .openai.reading import text_field
from .openai.response_builder import ResponseBuilder
from .openai.response_store import EventLog, ResponseStore, StoredResponse
from .openai.responses import KNOWN, ResponseAsk, not_included, read_response
from .responses_socket import ResponsesSocket, RunningResponse
from .service import HttpService, json_response, service_of
from .sse import event, streamed, while_connected

Json = dict[str, Any]

_log = logging.getLogger(__name__)
_DIGITS = 18  # of a sequence number at most


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
        given = await service.body(request)
        body, headers = service.split({**given, **not_included(given)}, KNOWN)
        handler = await service.llm(request, body.get("model"))
        ask = await self._read(service, handler, body, headers)
        builder = ResponseBuilder(ask, handler.name)
        if ask.background:
            stored = self._in_background(handler, ask, builder, caller_name())
            if stored.log is not None:
                return streamed(request, stored.log.after(-1), headers=headers)
            return json_response(stored.response, headers)
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
        handler = await service.llm(request, body["model"])
        ask = await self._read(service, handler, body, headers)
        builder = ResponseBuilder(ask, handler.name)
        await while_connected(request.receive, self._run(handler, ask, builder))
        return json_response(compaction.compacted(builder.response), headers)

    async def count(self, request: Request) -> Response:
        """Handle ``POST /v1/responses/input_tokens``: return the number of prompt tokens."""
        service = service_of(request)
        given = await service.body(request)
        body, headers = service.split({**given, **not_included(given)}, KNOWN)
        handler = await service.llm(request, body.get("model"))
        ask = await self._read(service, handler, body, headers)
        tokens = await handler.tokenize(ask.request.prompt)
        return json_response({"object": "response.input_tokens", "input_tokens": len(tokens)}, headers)

    async def connect(self, socket: WebSocket) -> None:
        """Handle a WebSocket at ``/v1/responses``."""
        await socket.accept()
        await ResponsesSocket(socket, _SocketTurns(self, socket)).run()

    async def start(self, socket: WebSocket, body: Json, store: ResponseStore) -> RunningResponse:
        """Start a turn of a WebSocket; ``store`` holds the last response of the connection."""
        service = service_of(socket)
        body, _ = service.split({**body, **not_included(body)}, KNOWN)
        handler = await service.llm(socket, body.get("model"))
        ask = await self._read(service, handler, body, {}, store)
        builder = ResponseBuilder(ask, handler.name)
        return RunningResponse(
            self._events(handler, ask, builder, caller_name(), store),
            lambda error: builder.end_with("failed", _error(error)),
        )

    async def _read(
        self,
        service: HttpService,
        handler: LLMHandler,
        body: Json,
        headers: dict[str, str],
        socket_store: ResponseStore | None = None,
    ) -> ResponseAsk:
        before: list[Message] = []
        if (previous := text_field("previous_response_id", body.get("previous_response_id"))) is not None:
            store = socket_store if socket_store is not None and previous in socket_store else self._store
            before = store.get(previous, caller_name()).messages
        read = read_response(body, handler.defaults, before)
        return dataclasses.replace(read, request=await service.admitted(read.request, headers))

    async def _run(
        self,
        handler: LLMHandler,
        ask: ResponseAsk,
        builder: ResponseBuilder,
        note: Callable[[Iterable[Json]], object] = list,
    ) -> None:
        """Generate the response; ``note`` takes the events of each delta."""
        async with aclosing(handler.generate(ask.request)) as deltas:
            async for delta in deltas:
                refuse_cancelled(delta)
                note(builder.of(delta))

    async def _events(
        self,
        handler: LLMHandler,
        ask: ResponseAsk,
        builder: ResponseBuilder,
        owner: str | None,
        store: ResponseStore | None = None,
    ) -> AsyncGenerator[list[Json], None]:
        first = list(builder.begin())
        async with aclosing(handler.generate(ask.request)) as deltas:
            async for delta in deltas:
                refuse_cancelled(delta)
                events = [*first, *builder.of(delta)]
                first = []
                if delta.usage is not None:  # store it before the client can request it by id
                    self._keep(ask, builder, owner, store)
                yield events

    def _keep(
        self,
        ask: ResponseAsk,
        builder: ResponseBuilder,
        owner: str | None,
        store: ResponseStore | None = None,
    ) -> None:
        stored = StoredResponse(builder.response, [*ask.messages, *builder.messages()], ask.items, owner)
        if ask.store:
            self._store.add(stored)
        if store is not None:
            store.add(stored)

    def _in_background(
        self, handler: LLMHandler, ask: ResponseAsk, builder: ResponseBuilder, owner: str | None
    ) -> StoredResponse:
        log = EventLog() if ask.stream else None
        stored = StoredResponse(builder.response, ask.messages, ask.items, owner, log=log)

        def note(events: Iterable[Json]) -> None:
            listed = list(events)
            if log is not None:
                pieces = [_event_bytes(one) for one in listed]
                log.add(pieces)
                self._store.count(stored, sum(map(len, pieces)))

        async def work() -> None:
            try:
                note(builder.begin())
                await self._run(handler, ask, builder, note)
                stored.messages = [*ask.messages, *builder.messages()]
            except asyncio.CancelledError:
                note([builder.end_with("cancelled")])
                raise
            except Exception as error:  # noqa: BLE001 -- every error must be reported to the client
                if not isinstance(error, CarryallError):
                    log_fault(_log, "-", "a response in the background", error)
                note([builder.end_with("failed", _error(error))])
            finally:
                self._store.count(stored)

        stored.task = asyncio.create_task(work())
        if log is not None:
            stored.task.add_done_callback(lambda _: log.end())  # also if it was cancelled before it began
        self._store.add(stored)
        return stored

    async def retrieve(self, request: Request) -> Response:
        """Handle ``GET /v1/responses/{id}``: return a stored response, or with ``stream=true`` its events.

        The events after the one with the ``sequence_number`` that ``starting_after`` states are repeated,
        then followed until the response ends.
        """
        stored, query = self._stored(request), request.query_params
        if (streams := query.get("stream", "false")) not in ("true", "false"):
            raise RequestError(f"'stream' must be true or false, not {shown(streams)}")
        if streams == "false":
            return json_response(stored.response)
        if stored.log is None:
            raise RequestError(
                "only responses created with 'background': true and 'stream': true have events"
            )
        after = query.get("starting_after", "-1")
        if not after.removeprefix("-").isdecimal() or len(after) > _DIGITS:
            raise RequestError(f"'starting_after' must be a sequence number, not {shown(after)}")
        return streamed(request, stored.log.after(max(-1, int(after))))

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

    async def start(self, body: Json) -> RunningResponse:
        enter_caller(self._policy.keys, self._socket.headers)  # the key may have been removed since
        return await self._api.start(self._socket, body, self._own)

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
        Route("/v1/responses/input_tokens", api.count, methods=["POST"]),
        Route("/v1/responses/compact", api.compact, methods=["POST"]),
        Route("/v1/responses/{id}", api.retrieve),
        Route("/v1/responses/{id}", api.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", api.items),
        Route("/v1/responses/{id}/cancel", api.cancel, methods=["POST"]),
    ]
