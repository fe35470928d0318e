"""Middleware for all routes: request ids, API keys, and checks of Host and Origin."""

from __future__ import annotations

import functools
import ipaddress
import logging
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....errors import RateLimitError
from ..access.policy import Policy
from ..core.caller import CALLER, Caller
from ..core.request_context import enter
from .errors import error_json, retry_after

_log = logging.getLogger(__name__)

# Paths that need no API key. They reveal nothing about the content of requests.
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
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = enter(Headers(scope=scope))
        status, complete, start = 0, False, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 -- ``error_response`` logged it; the server would log its text
            if not complete:
                raise RuntimeError(f"the response was cut off: {type(error).__name__}") from None
        finally:
            if _log.isEnabledFor(logging.INFO):
                seconds = time.monotonic() - start
                method, path = scope["method"], scope["path"]
                fields = {"method": method, "path": path, "status": status, "seconds": round(seconds, 4)}
                _log.info("%s %s %s %d %.3f s", name, method, path, status, seconds, extra={"fields": fields})


class Callers:
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
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        more: dict[str, str] = {}
        refusal = self._refusal(headers)
        caller: Caller | None = None
        if refusal is None and self._keys is not None and scope["path"] not in _OPEN:
            caller = self._keys.find(_key_of(headers))
            if caller is None:
                refusal = (401, "a valid API key is required: Authorization: Bearer KEY, or x-api-key: KEY")
                more = {"WWW-Authenticate": "Bearer"}
            else:
                try:
                    caller.budgets.count_request()
                except RateLimitError as error:
                    refusal, more = (429, str(error)), {"Retry-After": retry_after(error)}
        if refusal is not None:
            status, message = refusal
            answer = JSONResponse(error_json(scope["path"], status, message), status, more)
            await answer(scope, receive, send)
            return
        CALLER.set(caller)  # safe: each request runs in its own task
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if self._loopback and not _is_loopback(_without_port(host)):
            return 403, f"the service listens on a loopback address and refuses the host {host!r}; see --host"
        origin = headers.get("origin")
        if origin is None or origin in self._origins or "*" in self._origins:
            return None
        if origin.partition("://")[2] == host:
            return None
        return 403, f"the origin {origin!r} is not allowed; allow it with --cors-origin"


def _key_of(headers: Headers) -> str | None:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


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
    guarded: ASGIApp = Callers(app, policy)
    if policy.config.cors_origins:  # outermost, because a preflight request carries no key
        guarded = CORSMiddleware(
            guarded,
            allow_origins=policy.config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    return RequestIds(guarded)
