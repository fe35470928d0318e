"""The life of a service: listen, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from ...errors import EngineClosedError
from ..process.at_exit import LOADING
from .core.config import ServerConfig
from .core.handler import LLMHandler
from .core.served_model import ServedModel
from .grpc.server import GrpcServer

T = TypeVar("T")


async def serve(
    load: Callable[[], ServedModel], config: ServerConfig, on_ready: Callable[[str], None]
) -> bool:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends the process at once.

    The address is bound before the model is loaded, so that a taken port is known in the first second and
    health checks are answered (NOT_SERVING) meanwhile.

    Args:
        load: makes the engine; called in a thread of its own.
        config: where to listen, and how long to drain.
        on_ready: told the address, `host:port`, once requests are accepted.

    Returns:
        Whether all requests ended within the grace period.

    Raises:
        UsageError: the address cannot be bound.
        CarryallError: the model cannot be loaded.
        EngineClosedError: the engine died.
    """
    handler = LLMHandler()
    server = GrpcServer(handler, config)
    address = await server.start()
    model: ServedModel | None = None
    try:
        with _stop_signal() as stop:
            model = await _unless(stop, _in_thread(load))
            if model is not None:
                handler.ready(model)
                await server.set_serving()
                on_ready(address)
                lost = asyncio.create_task(handler.engine_lost.wait())
                if await _unless(stop, lost):
                    raise EngineClosedError("the engine stopped working; the service ends")
    finally:
        drained = await server.stop()
        if model is not None:
            model.llm.shutdown()
    return drained


@contextmanager
def _stop_signal() -> Iterator[asyncio.Event]:
    """Yield an event that the first SIGTERM or SIGINT sets; the next one does what it did before."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: FrameType | None) -> None:
        restore()
        loop.call_soon_threadsafe(stop.set)

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        restore()


async def _unless(stop: asyncio.Event, work: asyncio.Future[T]) -> T | None:
    """Return the work's result, or None if ``stop`` is set before; the work is not waited for then."""
    stopping = asyncio.create_task(stop.wait())
    try:
        pending: set[asyncio.Future[Any]] = {stopping, work}
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        stopping.cancel()
        work.cancel()


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run ``work`` in a daemon thread, which unlike an executor's does not hold up the process's end."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()  # from here on it cannot be cancelled

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 -- raised again where the result is awaited
            outcome.set_exception(error)

    threading.Thread(target=run, name=LOADING, daemon=True).start()
    return asyncio.wrap_future(outcome)
