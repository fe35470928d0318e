"""Run a service: listen, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from starlette.routing import BaseRoute

from ...errors import EngineClosedError, UsageError
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
    inference = Inference.of(models, config)
    policy = inference.models.policy
    models.observers.add(RequestLog(content=config.log_content))
    upkeep = Upkeep(models, scan, poll_seconds=config.models_poll_seconds, memory_limit=config.memory_limit)
    tracing = Tracing.to(config.otel_endpoint) if config.otel_endpoint else None
    if tracing:
        models.observers.add(tracing)
    grpc = GrpcServer(models, config, inference) if config.grpc_port is not None else None
    routes = [route for part in parts for route in part.routes()]
    app = make_app(models, inference, routes)
    http = HttpServer(app, config) if config.http_port is not None else None

    def reload() -> None:
        try:
            _reload(policy, reread)
        except UsageError as error:
            _log.warning("the settings are not reloaded: %s", error)
        upkeep.rescan()
        if http:
            http.reload_certificates()  # gRPC compares the files at each connection

    try:
        addresses = Addresses(
            http=await http.start() if http else None, grpc=await grpc.start() if grpc else None
        )
        with stop_signal() as stop, on_hangup(reload), lasting_objects():
            if await _unless(stop, _task(models.load_all())):
                for part in parts:
                    await part.start(inference.models)
                if grpc:
                    await grpc.set_serving()
                upkeep.start()
                on_ready(addresses)
                if await _unless(stop, _task(models.all_lost.wait())):
                    raise EngineClosedError("the engine stopped working; the service ends")
    finally:
        upkeep.stop()
        if grpc:
            await grpc.set_stopping()
        for part in parts:
            await part.stop()
        drained = await models.drain(policy.config.grace_seconds)
        for server in (grpc, http):
            if server:
                await server.stop()
        models.close()
        if tracing:
            await asyncio.to_thread(tracing.close)  # waits for the collector
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
