"""Run a service: listen, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from starlette.routing import BaseRoute

from ...errors import EngineClosedError, UsageError
from ...records import dataclass
from ..process.garbage import lasting_objects
from ..process.open_files import raise_open_files, warn_of_refused_connections
from .access.admission import Admission
from .access.policy import Policy
from .core.config import ServerConfig
from .core.repository import ModelRepository
from .core.upkeep import Scan, Upkeep
from .grpc.server import GrpcServer
from .http.app import make_app
from .http.server import HttpServer
from .kserve.inference import Inference
from .signals import on_hangup, stop_signal
from .telemetry.request_log import RequestLog
from .telemetry.tracing import Tracing

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses that a service listens on.

    Args:
        http: ``host:port``; None if HTTP is off.
        grpc: ``host:port``; None if gRPC is off.
    """

    http: str | None = None
    grpc: str | None = None


class ServicePart(Protocol):
    """A part of the service with its own routes and background work, such as batches."""

    def routes(self) -> Sequence[BaseRoute]:
        """Return the routes of the HTTP application."""

    async def start(self, models: Admission) -> None:
        """Start background work; called after the models are loaded."""

    async def stop(self) -> None:
        """Stop background work; called before requests are drained."""


async def serve(
    models: ModelRepository,
    config: ServerConfig,
    on_ready: Callable[[Addresses], None],
    parts: Sequence[ServicePart] = (),
    reread: Callable[[], ServerConfig] | None = None,
    scan: Scan | None = None,
) -> bool:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends the process at once.

    The addresses are bound before models are loaded: a taken port fails at once, and health checks are
    answered (NOT_SERVING) during loading.

    Args:
        models: the models to load and serve; freed at the end.
        config: the service's settings.
        on_ready: called with the addresses when requests are accepted.
        parts: further parts of the service.
        reread: returns the present settings after SIGHUP; None keeps the settings, and reloads only API keys
            and certificates.
        scan: finds the present models of the folder of models; None keeps the models.

    Returns:
        Whether all requests ended within the grace period.

    Raises:
        UsageError: an address cannot be bound.
        CarryallError: a model cannot be loaded.
        EngineClosedError: the last working engine has failed.
    """
    raise_open_files()
    warn_of_refused_connections(asyncio.get_running_loop())
    service = _Service(models, config, parts, scan)
    try:
        addresses = await service.listen()
        with stop_signal() as stop, on_hangup(lambda: service.reload(reread)), lasting_objects():
            if await _unless(stop, _task(models.load_all())):
                await service.accept_requests()
                on_ready(addresses)
                if await _unless(stop, _task(models.all_lost.wait())):
                    raise EngineClosedError("the engine stopped working; the service ends")
    finally:
        drained = await service.stop()
    return drained


class _Service:
    """The servers of a process and the work beside them; see ``serve`` for the arguments."""

    def __init__(
        self,
        models: ModelRepository,
        config: ServerConfig,
        parts: Sequence[ServicePart],
        scan: Scan | None,
    ) -> None:
        self._models, self._parts = models, parts
        self._inference = inference = Inference.of(models, config)
        models.observers.add(RequestLog(content=config.log_content))
        self._upkeep = Upkeep(
            models, scan, poll_seconds=config.models_poll_seconds, memory_limit=config.memory_limit
        )
        self._tracing = Tracing.to(config.otel_endpoint) if config.otel_endpoint else None
        if self._tracing:
            models.observers.add(self._tracing)
        self._grpc = GrpcServer(models, config, inference) if config.grpc_port is not None else None
        routes = [route for part in parts for route in part.routes()]
        app = make_app(models, inference, routes)
        self._http = HttpServer(app, config) if config.http_port is not None else None

    async def listen(self) -> Addresses:
        """Bind the addresses.

        Raises:
            UsageError: an address cannot be bound.
        """
        return Addresses(
            http=await self._http.start() if self._http else None,
            grpc=await self._grpc.start() if self._grpc else None,
        )

    async def accept_requests(self) -> None:
        """Start the background work and report as serving, after the models are loaded."""
        for part in self._parts:
            await part.start(self._inference.models)
        if self._grpc:
            await self._grpc.set_serving()
        self._upkeep.start()

    def reload(self, reread: Callable[[], ServerConfig] | None) -> None:
        """Take over changed settings, API keys, models and certificates."""
        try:
            _reload(self._inference.models.policy, reread)
        except UsageError as error:
            _log.warning("the settings are not reloaded: %s", error)
        self._upkeep.rescan()
        if self._http:
            self._http.reload_certificates()  # gRPC compares the files at each connection

    async def stop(self) -> bool:
        """Refuse new requests, wait for those in progress, and free all; works in every state.

        Returns:
            Whether all requests ended within the grace period.
        """
        self._upkeep.stop()
        if self._grpc:
            await self._grpc.set_stopping()
        for part in self._parts:
            await part.stop()
        drained = await self._models.drain(self._inference.models.policy.config.grace_seconds)
        for server in (self._grpc, self._http):
            if server:
                await server.stop()
        self._models.close()
        if self._tracing:
            await asyncio.to_thread(self._tracing.close)  # waits for the collector
        return drained


def _reload(policy: Policy, reread: Callable[[], ServerConfig] | None) -> None:
    """Reload API keys, and the settings if they can be read.

    Raises:
        UsageError: the settings cannot be read.
    """
    try:
        config = reread() if reread is not None else None
    except UsageError:
        policy.reload(None)
        raise
    policy.reload(config)


def _task(work: Coroutine[Any, Any, object]) -> asyncio.Task[bool]:
    """Return a task that runs ``work`` and returns True."""

    async def run() -> bool:
        await work
        return True

    return asyncio.create_task(run())


async def _unless(stop: asyncio.Event, work: asyncio.Future[T]) -> T | None:
    """Return the work's result, or cancel it and return None if ``stop`` is set first."""
    stopping = asyncio.create_task(stop.wait())
    try:
        pending: set[asyncio.Future[Any]] = {stopping, work}
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        stopping.cancel()
        work.cancel()
