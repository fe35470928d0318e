"""An HTTP server on one address that runs in the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from ....errors import UsageError
from ..access.tls import Tls
from ..core.config import ServerConfig
from .protocol import limited

_log = logging.getLogger(__name__)

CLOSING_SECONDS = 1
_WATCH_SECONDS = 5.0
# Longer than load balancers (60 s) and clients (5 s) keep idle connections: if both sides end one at the same
# moment, a request may be lost.
_KEEP_ALIVE_SECONDS = 65
_BACKLOG = 2048
# After this time without a sign of a client's host, the kernel ends the connection.
_LOST_SECONDS = 120
_PROBE_SECONDS = 60


class _Server(uvicorn.Server):
    """A uvicorn server that ends at once and has no signal handlers, because the process installs its own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Close the port, then open connections."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        ticks = asyncio.create_task(super().main_loop())  # sees should_exit only every 0.1 s
        ending = asyncio.create_task(self._ending.wait())
        await asyncio.wait({ticks, ending}, return_when=asyncio.FIRST_COMPLETED)
        for task in (ticks, ending):
            task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serve an application from ``start`` to ``stop``.

    Args:
        app: an ASGI application.
        config: the host, port and certificates.
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
                proxy_headers=False,  # the service does not use the client's address
                timeout_graceful_shutdown=CLOSING_SECONDS,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                ws="websockets-sansio",
                ws_max_size=config.max_body_bytes,
                ws_per_message_deflate=False,  # a small message must not become a large one
                http=limited(config.body_timeout_seconds),
            )
        )
        self._tls = Tls.of(config)
        self._context: ssl.SSLContext | None = None
        self._stamp: tuple[int, ...] = ()
        self._serving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start to listen and return the address as ``host:port``.

        Raises:
            UsageError: the address cannot be bound, or a certificate is invalid.
        """
        if self._tls is not None:
            self._server.config.load()
            self._server.config.ssl = context = self._tls.context()
            # The context of the port cannot be exchanged, but each connection can get another one.
            context.sni_callback = self._use_current
            self._context, self._stamp = context, self._tls.stamp()
            self._watching = asyncio.create_task(self._watch())
        bound = _bound(self._config.host, self._config.http_port or 0)
        sockets = [bound]
        if self._config.unix_socket is not None:
            sockets.append(_bound_file(self._config.unix_socket))
        self._serving = asyncio.create_task(self._server.serve(sockets))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.005)
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"{host}:{bound.getsockname()[1]}"

    async def stop(self) -> None:
        """Close the port and end open connections after ``CLOSING_SECONDS``."""
        if self._watching is not None:
            self._watching.cancel()
        if self._serving is not None:
            self._server.end()
            await self._serving
            if self._config.unix_socket is not None:
                self._config.unix_socket.unlink(missing_ok=True)

    async def _watch(self) -> None:
        """Check every ``_WATCH_SECONDS`` for renewed certificates."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            self.reload_certificates()

    def _use_current(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        if self._context is not None:
            connection.context = self._context

    def reload_certificates(self) -> None:
        """Use renewed certificates for new connections."""
        if self._tls is None or self._context is None or (now := self._tls.stamp()) == self._stamp:
            return
        self._stamp = now
        try:
            self._context = self._tls.context()  # a new one, since a context keeps the CA that it had
        except UsageError as error:  # may be half-written; keep the old certificate
            _log.warning("cannot load the renewed certificate, keeping the old one: %s", error)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only if the socket names its protocol. With it, an answer would
    # wait for the acknowledgement of its head, which clients delay by 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # Without SO_REUSEADDR, a port stays unusable for about 1 minute after a restart. On Windows this
        # option would let 2 servers bind the same port, so SO_EXCLUSIVEADDRUSE replaces it.
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _end_connections_of_lost_hosts(bound)
        bound.bind((host, port))
        bound.listen(_BACKLOG)
        bound.setblocking(False)
    except (OSError, TypeError, UnicodeError) as error:  # the latter two: the name is no text
        bound.close()
        raise UsageError(
            f"cannot listen on {ascii(host)[1:-1]}:{port}: {getattr(error, 'strerror', None) or error}. "
            "Choose another port or host with --http-port or --host"
        ) from error
    return bound


def _bound_file(path: Path) -> socket.socket:
    """Listen on a socket in the file system, which only this user may open."""
    if not hasattr(socket, "AF_UNIX"):
        raise UsageError("this system has no sockets in the file system; omit --unix-socket")
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()  # a process that was killed has left it
        before = os.umask(0o177)
        try:
            bound.bind(str(path))
        finally:
            os.umask(before)
        bound.listen(_BACKLOG)
        bound.setblocking(False)
    except (OSError, ValueError) as error:
        bound.close()
        raise UsageError(
            f"cannot listen on {ascii(str(path))[1:-1]}: {getattr(error, 'strerror', None) or error}. Choose "
            "another path with --unix-socket, of at most 100 bytes, in a folder you can write to"
        ) from error
    return bound


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(str(path)) == 0


def _end_connections_of_lost_hosts(bound: socket.socket) -> None:
    """Let the kernel probe idle connections and bound its repeats; accepted sockets inherit these options."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = {"TCP_KEEPIDLE": _PROBE_SECONDS, "TCP_KEEPINTVL": _PROBE_SECONDS // 6, "TCP_KEEPCNT": 6}
    for name, value in {**seconds, "TCP_USER_TIMEOUT": _LOST_SECONDS * 1000}.items():
        if hasattr(socket, name):  # not every system has each of them
            bound.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
