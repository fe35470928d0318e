"""What stands in front of every route: who calls, from where, and under which id."""

from __future__ import annotations

import ipaddress
import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.admission import CALLER
from ..core.api_keys import ApiKeys, Caller
from ..core.config import ServerConfig
from .errors import error_json

_log = logging.getLogger(__name__)

# What may be asked without a key: it tells nothing of requests' contents.
_OPEN = ("/", "/health", "/health/live", "/health/ready", "/ping", "/version", "/metrics", "/v2/health/live",
         "/v2/health/ready")  # fmt: skip


class RequestIds:
    """Gives each request an id, the client's own if it sent one, and logs how it went; never its content."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if given and len(given) <= 128 and given.isprintable() else uuid.uuid4().hex
        status, start = 0, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if _log.isEnabledFor(logging.INFO):
                seconds = time.monotonic() - start
                _log.info("%s %s %s %d %.3f s", name, scope["method"], scope["path"], status, seconds)


class Callers:
    """Refuses requests from web pages of other origins, to other hosts, and without a key.

    A page that a user of this machine visits can send requests to loopback addresses; the browser states its
    origin. A page whose domain name was made to point to a loopback address states that name as host.

    Args:
        app: what comes behind.
        config: the address listened on, and origins that are welcome.
        keys: None lets everybody in.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, keys: ApiKeys | None) -> None:
        self._app = app
        self._keys = keys
        self._origins = config.cors_origins
        self._loopback = _is_loopback(config.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._wrong_place(headers)
        caller: Caller | None = None
        if refusal is None and self._keys is not None and scope["path"] not in _OPEN:
            caller = self._keys.find(_key_of(headers))
            if caller is None:
                refusal = (401, "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
        if refusal is not None:
            status, message = refusal
            more = {"WWW-Authenticate": "Bearer"} if status == 401 else None
            answer = JSONResponse(error_json(scope["path"], status, message), status, more)
            await answer(scope, receive, send)
            return
        CALLER.set(caller)  # each request has a task of its own
        await self._app(scope, receive, send)

    def _wrong_place(self, headers: Headers) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if self._loopback and not _is_loopback(_without_port(host)):
            return 403, f"the service listens on this machine only, not as {host!r}; see --host"
        origin = headers.get("origin")
        if origin is None or origin in self._origins or "*" in self._origins:
            return None
        if origin.partition("://")[2] == host:
            return None
        return 403, f"pages of {origin!r} may not call this service; --cors-origin allows an origin"


def _key_of(headers: Headers) -> str | None:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def wrapped(app: ASGIApp, config: ServerConfig, keys: ApiKeys | None) -> ASGIApp:
    """An application behind all of it."""
    guarded: ASGIApp = Callers(app, config, keys)
    if config.cors_origins:  # answers a browser's question before its request, which has no key
        guarded = CORSMiddleware(
            guarded,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    return RequestIds(guarded)
