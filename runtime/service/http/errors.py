"""Convert errors to the JSON error format of each API."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ....errors import CarryallError, PromptTooLongError, QueueFullError, RateLimitError, UnknownModelError
from ...process.faults import log_fault
from ..core.status import status_of

Json = dict[str, Any]

_log = logging.getLogger(__name__)

_OPENAI = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
           429: "rate_limit_error"}  # fmt: skip
_ANTHROPIC = {**_OPENAI, 413: "request_too_large", 503: "overloaded_error"}
# OpenAI's codes, by the very class: an unknown response is an unknown model too.
_CODES: dict[type[Exception], str] = {
    UnknownModelError: "model_not_found",
    PromptTooLongError: "context_length_exceeded",
}
_LONGEST_RETRY = 60


def openai_error(status: int, message: str, code: str | None = None) -> Json:
    """Return an error in OpenAI's format, which is also the default for other paths."""
    kind = _OPENAI.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def anthropic_error(status: int, message: str, code: str | None = None) -> Json:
    """Return an error in Anthropic's format."""
    kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def tgi_error(status: int, message: str, code: str | None = None) -> Json:
    """Return an error in the format of text-generation-inference."""
    kind = {429: "overloaded", 503: "overloaded"}.get(status, "validation" if status < 500 else "generation")
    return {"error": message, "error_type": kind}


def plain_error(status: int, message: str, code: str | None = None) -> Json:
    """Return an error in the format of Ollama and of the Open Inference Protocol."""
    return {"error": message}


# Maps a path prefix to the error format of that API.
_SHAPES: dict[str, Callable[[int, str, str | None], Json]] = {
    "/v1/messages": anthropic_error,
    "/api/": plain_error,
    "/v2/": plain_error,
    **dict.fromkeys(("/generate", "/embed", "/similarity", "/predict"), tgi_error),
}


def error_json(path: str, status: int, message: str, code: str | None = None) -> Json:
    """Return an error in the format of the API that ``path`` belongs to."""
    if path == "/":  # the root of text-generation-inference
        return tgi_error(status, message, code)
    shape = next((shape for prefix, shape in _SHAPES.items() if path.startswith(prefix)), openai_error)
    return shape(status, message, code)


def described(error: Exception) -> tuple[int, str, str | None]:
    """Return the HTTP status, the message and OpenAI's error code (or None) of an error."""
    if isinstance(error, CarryallError):
        return status_of(error).http, str(error), _CODES.get(type(error))
    if isinstance(error, HTTPException):
        return error.status_code, error.detail, None
    return 500, "internal error; see the log of the service", None


def retry_after(error: Exception) -> str:
    """Return the header ``Retry-After`` for an error."""
    if isinstance(error, RateLimitError):
        return str(max(1, math.ceil(error.retry_after)))
    seconds = error.retry_after if isinstance(error, QueueFullError) else 1  # an estimate
    return str(min(_LONGEST_RETRY, max(1, math.ceil(seconds))))


def error_response(request: Request, error: Exception) -> Response:
    """Return the HTTP response for an error. Errors with status 500 are logged."""
    status, message, code = described(error)
    if status == 500:
        log_fault(_log, "-", f"{request.method} {request.url.path}", error)
    headers = dict(getattr(error, "headers", None) or {})
    if status in (429, 503):
        headers["Retry-After"] = retry_after(error)
    return JSONResponse(error_json(request.url.path, status, message, code), status, headers)
