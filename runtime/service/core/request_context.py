"""The id of the current request, for logs, and the trace that it belongs to."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextvars import ContextVar

from .... import logs

HEADER = "x-request-id"
PROMISE_HEADER = "X-Carryall-First-Token-Seconds"
_LONGEST = 128

# Headers of the answer to the current request, which are known when its model has queued it.
ANSWER_HEADERS: ContextVar[dict[str, str] | None] = ContextVar("answer_headers", default=None)

# The headers ``traceparent`` and ``tracestate`` of the current request (https://www.w3.org/TR/trace-context/).
TRACE: ContextVar[Mapping[str, str]] = ContextVar("trace", default={})  # noqa: B039 -- never changed


def promise(seconds: float | None) -> None:
    """Tell the client of the current request when its first token is expected; None is not known."""
    headers = ANSWER_HEADERS.get()
    if headers is not None and seconds is not None:
        headers.setdefault(PROMISE_HEADER, f"{seconds:.3g}")


def enter(headers: Mapping[str, str]) -> str:
    """Begin a request in the current task, and return its id.

    The id is the client's ``x-request-id`` if that is printable and at most 128 characters long, else
    random. Log records of this task have it.
    """
    given = headers.get(HEADER, "")
    own = given if given and len(given) <= _LONGEST and given.isprintable() else uuid.uuid4().hex
    logs.CONTEXT.set({"request_id": own})
    ANSWER_HEADERS.set({})
    TRACE.set({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
    return own
