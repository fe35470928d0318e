"""The actors of a deployment: replicas of the service, and the front that chooses one for each request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ...errors import ServiceUnavailableError
from ...records import dataclass
from ..engine.config import EngineConfig
from ..models.config import ModelConfig
from ..process.ray_cluster import ray_module, unpacked
from ..service.core.config import ServerConfig
from ..service.core.repository import ModelRepository
from ..service.core.served_model import load_served_model
from ..service.http.app import make_app
from ..service.http.bodies import read_bytes
from ..service.http.errors import described, error_json, error_response
from ..service.http.sse import event
from ..service.kserve.inference import Inference
from ..service.telemetry.request_log import RequestLog
from . import prefix_index  # the module: Ray would send a copy of the index itself with the classes
from .affinity import Affinity, affinity_of
from .autoscaling import BUSY_SLOTS, WAITING_TOKENS

_log = logging.getLogger(__name__)

# A request has no effects beside its answer, so another replica can take it while no byte of that was sent.
_REPLICAS_TRIED = 3
HELD = "carryall.held"  # the type of a replica's last message
_LOST = ServiceUnavailableError("the replica that answered was lost; send the request again")


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica serves.

    Args:
        name: the name of the model for clients.
        model: the model and how to load it.
        engine: scheduling options.
        server: the settings of the service.
        archive_name: the name of the archive of the model's folder; empty if nodes find the model themselves.
    """

    name: str
    model: ModelConfig
    engine: EngineConfig
    server: ServerConfig
    archive_name: str = ""


class Replica:
    """One engine with the HTTP application in front of it.

    Args:
        spec: what to serve.
        packed: Ray's reference of the tar archive of the model's folder, which Ray Serve does not replace by
            its value; None if the node finds the model itself.
    """

    def __init__(self, spec: ReplicaSpec, packed: Any) -> None:
        model = spec.model
        if packed is not None:
            folder = unpacked(spec.archive_name, ray_module().get(packed))
            model = replace(model, model=str(folder))

        def load() -> Any:
            return load_served_model(
                model, name=spec.name, engine_config=spec.engine, warm_up=spec.server.warm_up
            )

        aliases = spec.server.names_for(spec.name)
        self._models = ModelRepository.of_one(
            spec.name, load, aliases=aliases, keep_seconds=spec.server.keep_alive_seconds
        )
        self._models.observers.add(RequestLog(content=spec.server.log_content))
        self._app = make_app(self._models, Inference.of(self._models, spec.server))
        self._loading: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Load the model at the first call; Ray Serve sends requests after that.

        Raises:
            CarryallError: the model cannot be loaded, or its engine has failed.
        """
        if self._loading is None:
            self._loading = asyncio.create_task(self._models.load_all())
        await self._loading
        if not self._models.ready:
            raise RuntimeError("the engine has failed")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load of this replica, for ``autoscaling.WaitingTokens``; nothing until it is loaded."""
        if not self._models.ready:
            return {}
        engine = self._models.llm().llm.engine
        stats = engine.stats()
        return {
            WAITING_TOKENS: float(engine.scheduler.queued_tokens),
            BUSY_SLOTS: stats.running / stats.slots,
        }

    @property
    def active(self) -> int:
        """Return the number of requests in progress."""
        return self._models.llm().active

    def close(self) -> None:
        """Free the model."""
        self._models.close()

    async def answer(
        self, scope: dict[str, Any], body: bytes, chunks: tuple[bytes, ...] = ()
    ) -> AsyncGenerator[Message, None]:
        """Answer a request with the messages of ASGI. Closing the generator ends the request.

        The last message is not of ASGI: it tells since when this replica has evicted nothing.

        Args:
            scope: of the request.
            body: of the request.
            chunks: hashes of the beginnings of its prompt, which the router reads.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        given = asyncio.Event()

        async def receive() -> Message:
            if given.is_set():
                await asyncio.Event().wait()  # the caller closes the generator instead of a disconnect
            given.set()
            return {"type": "http.request", "body": body, "more_body": False}

        work = asyncio.ensure_future(self._app(scope, receive, messages.put))
        work.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            await work  # raises its error
            if chunks and self._models.ready:
                since = self._models.llm().llm.engine.scheduler.cache.evicted_until
                held = None if since is None else time.monotonic() - since
                yield {"type": HELD, "replica": _replica_id(), "seconds": held}
        finally:
            work.cancel()


def _replica_id() -> str:
    """Return the id by which routers know this replica."""
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


class Front:
    """Sends each request to the replica of its session or conversation.

    Args:
        replicas: the handle of the replicas; its router maps equal keys to equal replicas.
        server: the settings of the service.
    """

    def __init__(self, replicas: Any, server: ServerConfig) -> None:
        self._replicas, self._server = replicas, server

    async def __call__(self, request: Request) -> Response:
        """Return the response of a replica, as it arrives."""
        try:
            body = await read_bytes(request, self._server.max_body_bytes, self._server.body_timeout_seconds)
        except HTTPException as error:
            return error_response(request, error)
        return _Relayed(self._replicas, affinity_of(request.headers, body), body)


class _Relayed(Response):
    """The messages of a replica, or of another one if the first is lost before it answers."""

    def __init__(self, replicas: Any, affinity: Affinity, body: bytes) -> None:
        super().__init__()
        self._replicas, self._affinity, self._request_body = replicas, affinity, body
        self._start: Message | None = None  # of the response, once a replica answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response to an ASGI connection."""
        lost = ray_module().exceptions.RayActorError
        for _ in range(_REPLICAS_TRIED):
            try:
                await self._relay(scope, send)
                return
            except lost as error:
                _log.warning("a replica was lost while it answered: %s", error)
                if self._start is not None:
                    await self._break_off(scope["path"], send, error)
                    return
        await error_response(Request(scope), _LOST)(scope, receive, send)

    async def _relay(self, scope: Scope, send: Send) -> None:
        kept = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")
        sent = {name: scope[name] for name in kept if name in scope}
        key, chunks = self._affinity.key, self._affinity.chunks
        options = {"session_id": key} if key else {}
        answer = self._replicas.options(stream=True, **options).answer.remote(
            sent, self._request_body, chunks
        )
        try:
            async for message in answer:
                if message["type"] == HELD:
                    prefix_index.INDEX.use(chunks, message["replica"])
                    prefix_index.INDEX.holds_since(message["replica"], message["seconds"])
                    continue
                self._start = self._start or message
                await send(message)
        except asyncio.CancelledError:
            answer.cancel()
            raise

    async def _break_off(self, path: str, send: Send, error: Exception) -> None:
        """End a stream with an error event; what has begun otherwise can only be cut off."""
        headers = dict(self._start["headers"]) if self._start else {}
        if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            raise error
        last = event(error_json(path, *described(_LOST)))
        await send({"type": "http.response.body", "body": last, "more_body": False})
