"""Convert errors to gRPC statuses with google.rpc details (https://google.aip.dev/193)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from ....errors import (
    CarryallError,
    ChatTemplateError,
    InvalidSamplingError,
    PromptTooLongError,
    RateLimitError,
    RequestFailedError,
    UnknownModelError,
)
from ...process.faults import log_fault
from ..core.status import status_of

Context = grpc.aio.ServicerContext[Any, Any]

# Seconds after which a client may retry a refused request, unless the error knows better.
RETRY_SECONDS = 1.0
_RETRYABLE = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
# The request field of each error class.
_FIELDS: dict[type[CarryallError], str] = {
    InvalidSamplingError: "sampling",
    ChatTemplateError: "messages",
    PromptTooLongError: "prompt",
    UnknownModelError: "model",
}
_log = logging.getLogger(__name__)


@asynccontextmanager
async def errors_as_status(context: Context) -> AsyncIterator[None]:
    """End the call with the status of an error that is raised inside.

    gRPC's own retries use `grpc-retry-pushback-ms`
    (https://github.com/grpc/proposal/blob/master/A6-client-retries.md). Other clients use RetryInfo.
    """
    try:
        yield
    except (CarryallError, grpc.aio.AbortError) as error:
        if isinstance(error, grpc.aio.AbortError):
            raise
        await _abort(context, error)
    except Exception as error:
        if context.done():  # the client is gone and cannot get a status
            raise
        log_fault(_log, "-", "a call", error)
        await _abort(context, RequestFailedError(f"internal error of the server: {type(error).__name__}"))


def code_of(error: CarryallError) -> grpc.StatusCode:
    """Return the gRPC status code of an error."""
    return grpc.StatusCode[status_of(error).grpc]


async def _abort(context: Context, error: CarryallError) -> None:
    code = code_of(error)
    # ``abort`` replaces what was set before, such as the request id.
    metadata: list[tuple[str, str | bytes]] = list(context.trailing_metadata() or ())
    details = _details(code, error)
    if details:
        metadata.append(("grpc-status-details-bin", _status(code, error, details).SerializeToString()))
    if code in _RETRYABLE:
        metadata.append(("grpc-retry-pushback-ms", str(int(1000 * _retry_seconds(error)))))
    await context.abort(code, str(error), tuple(metadata))


def _retry_seconds(error: CarryallError) -> float:
    """Return the seconds after which a client may retry."""
    return max(RETRY_SECONDS, error.retry_after) if isinstance(error, RateLimitError) else RETRY_SECONDS


def _details(code: grpc.StatusCode, error: CarryallError) -> list[Message]:
    if code in _RETRYABLE:
        delay = Duration()
        delay.FromMilliseconds(int(1000 * _retry_seconds(error)))
        return [error_details_pb2.RetryInfo(retry_delay=delay)]
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field = next((name for kind, name in _FIELDS.items() if isinstance(error, kind)), "")
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=str(error))
        return [error_details_pb2.BadRequest(field_violations=[violation])]
    return []


def _status(code: grpc.StatusCode, error: CarryallError, details: list[Message]) -> status_pb2.Status:
    packed = []
    for detail in details:
        any_message = AnyMessage()
        any_message.Pack(detail)
        packed.append(any_message)
    return status_pb2.Status(code=code.value[0], message=str(error), details=packed)
