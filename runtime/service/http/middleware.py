"""Middleware for all routes: request ids, API keys, and checks of Host and Origin."""

from __future__ import annotations

import functools
import ipaddress
import logging
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....errors import RateLimitError
from ....options import shown
from ..access.api_keys import ApiKeys
from ..access.policy import Policy
from ..core.caller import CALLER
from ..core.request_context import ANSWER_HEADERS, enter
from .errors import described, error_json, retry_after

_log = logging.getLogger(__name__)

# Paths that need no API key to be read. They reveal nothing about the content of requests.
_OPEN = ("/", "/health", "/health/live", "/health/ready", "/ping", "/version", "/metrics", "/v2/health/live",
         "/v2/health/ready")  # fmt: skip


class RequestIds:
    """Set ``X-Request-Id`` and log method, path, status and seconds of each request, but not its content.

    The id is the client's ``X-Request-Id``, or a random one; see ``request_context``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        name = enter(Headers(scope=scope))
        status, complete, start = 0, False, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status, complete
            kind = message["type"].removeprefix("websocket.")
            if kind in ("http.response.start", "accept"):
                status = message.get("status", 101)
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = name
                headers.update(ANSWER_HEADERS.get() or {})
            await send(message)
            complete = kind == "close" or (kind == "http.response.body" and not message.get("more_body"))

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 -- ``error_response`` logged it; the server would log its text
            if not complete:
                raise RuntimeError(f"the response was cut off: {type(error).__name__}") from None
        finally:
            if _log.isEnabledFor(logging.INFO):
                seconds = time.monotonic() - start
                method, path = scope.get("method", "WEBSOCKET"), scope["path"]
                fields = {"method": method, "path": path, "status": status, "seconds": round(seconds, 4)}
                _log.info("%s %s %s %d %.3f s", name, method, path, status, seconds, extra={"fields": fields})


class CallerMiddleware:
    """Refuse requests without a valid API key, from foreign origins, or with a foreign Host (DNS rebinding).

    Any web page in a browser on this machine can send requests to loopback addresses. The browser puts the
    page's origin into ``Origin``. With DNS rebinding, ``Host`` holds the page's domain name.

    Args:
        app: the ASGI application that handles accepted requests.
        policy: the address to listen on, the allowed origins and the API keys.
    """

    def __init__(self, app: ASGIApp, policy: Policy) -> None:
        self._app = app
        self._keys = policy.keys
        self._origins = policy.config.cors_origins
        self._loopback = _is_loopback(policy.config.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "lifespan":  # the server's own; all others come from clients
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_origin(headers)
            CALLER.set(None)  # safe: each request runs in its own task
            if not _is_open(scope):
                # A WebSocket counts a request for each of its messages instead.
                enter_caller(self._keys, headers, counted=scope["type"] == "http")
        except (HTTPException, RateLimitError) as error:
            status, message, code = described(error)
            more = dict(getattr(error, "headers", None) or {})
            if status == 429:
                more["Retry-After"] = retry_after(error)
            await JSONResponse(error_json(scope["path"], status, message, code), status, more)(
                scope, receive, send
            )
            return
        await self._app(scope, receive, send)

    def _check_origin(self, headers: Headers) -> None:
        host = headers.get("host", "")
        name = _without_port(host)
        if self._loopback and not (_is_loopback(name) or _is_private(name)):
            raise HTTPException(
                403,
                f"the service listens on a loopback address and refuses the host {shown(host)}, which a web "
                "page could own; call it as localhost or by a name in .local, .internal or .localhost, or "
                "listen on another address with --host (and --api-keys)",
            )
        origin = headers.get("origin")
        if origin is None or origin in self._origins or "*" in self._origins:
            return
        if origin.partition("://")[2] != host:
            raise HTTPException(
                403, f"the origin {shown(origin)} is not allowed; allow it with --cors-origin"
            )


def _is_open(scope: Scope) -> bool:
    """Return whether a request needs no API key. ``POST /`` generates text, so the method matters."""
    return scope["path"] in _OPEN and scope.get("method") in ("GET", "HEAD")


def enter_caller(keys: ApiKeys | None, headers: Headers, *, counted: bool = True) -> None:
    """Find the caller of the current request by its API key, and count the request; None keys accept all.

    Raises:
        HTTPException: there is no such key.
        RateLimitError: the requests of the key are used up.
    """
    if keys is None:
        return
    caller = keys.find(_key_of(headers))
    if caller is None:
        told = "a valid API key is required: Authorization: Bearer KEY, or x-api-key: KEY"
        raise HTTPException(401, told, {"WWW-Authenticate": "Bearer"})
    if counted:
        caller.budgets.count_request()
    CALLER.set(caller)


def _key_of(headers: Headers) -> str | None:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_private(host: str) -> bool:
    """Return whether no one can own a host name in the public DNS, so that no page can be rebound to it.

    Docker names its host so (host.docker.internal), and multicast DNS machines (RFC 6762, RFC 6761).
    """
    return host.lower().rstrip(".").rpartition(".")[2] in ("internal", "local", "localhost") and "." in host


@functools.lru_cache(maxsize=64)  # bounded, since clients choose the names
def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def wrapped(app: ASGIApp, policy: Policy) -> ASGIApp:
    """Return the application wrapped in all middleware."""
    guarded: ASGIApp = CallerMiddleware(app, policy)
    if policy.config.cors_origins:  # outermost, because a preflight request carries no key
        guarded = CORSMiddleware(
            guarded,
            allow_origins=policy.config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    return RequestIds(guarded)
