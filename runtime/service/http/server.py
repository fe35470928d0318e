"""An HTTP server bound to one address, in the event loop of its caller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn

from ....errors import UsageError
from ..core.config import ServerConfig
from ..core.tls import Tls

_log = logging.getLogger(__name__)

CLOSING_SECONDS = 1
_WATCH_SECONDS = 5.0
_BACKLOG = 2048


class _Server(uvicorn.Server):
    """uvicorn's, without its signal handlers: the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an application from ``start`` to ``stop``.

    Args:
        app: an ASGI application.
        config: where to listen.
    """

    def __init__(self, app: Any, config: ServerConfig) -> None:
        self._config = config
        self._server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=CLOSING_SECONDS,
                ws="none",
            )
        )
        self._tls = Tls.of(config)
        self._serving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen; return the address, ``host:port``.

        Raises:
            UsageError: the address cannot be bound, or a certificate cannot be used.
        """
        if self._tls is not None:
            self._server.config.load()
            self._server.config.ssl = context = self._tls.context()
            self._watching = asyncio.create_task(_watch(self._tls, context))
        bound = _bound(self._config.host, self._config.http_port or 0)
        self._serving = asyncio.create_task(self._server.serve([bound]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.005)
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"{host}:{bound.getsockname()[1]}"

    async def stop(self) -> None:
        """Close the port and end what is left."""
        if self._watching is not None:
            self._watching.cancel()
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving


async def _watch(tls: Tls, context: ssl.SSLContext) -> None:
    """Take renewed certificates for new connections."""
    stamp = tls.stamp()
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        if (now := tls.stamp()) == stamp:
            continue
        stamp = now
        try:
            tls.load_into(context)
        except UsageError as error:  # half-written; the old ones stay
            _log.warning("the renewed certificate is not used: %s", error)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Else a port is taken for a minute after a server that had connections. (On Windows it would let a
        # second server take the port of a first.)
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(_BACKLOG)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise UsageError(
            f"cannot listen on {host}:{port}: is the port taken, the host this machine's, the port allowed? "
            "Choose another with --http-port or --host"
        ) from error
    return bound
