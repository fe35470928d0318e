"""Statuses of calls as the errors that the service raised; the gRPC error is their ``__cause__``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from ..errors import (
    CarryallError,
    QueueFullError,
    RequestCancelled,
    RequestError,
    RequestFailedError,
    ServiceUnavailableError,
    UnknownModelError,
    UnsupportedTaskError,
)


class AccessError(CarryallError):
    """The API key is missing or unknown, or does not allow this."""


class CallTimeoutError(RequestCancelled, TimeoutError):
    """The call's ``timeout`` passed before it was finished."""


ERRORS: dict[grpc.StatusCode, type[CarryallError]] = {
    grpc.StatusCode.CANCELLED: RequestCancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: CallTimeoutError,
    grpc.StatusCode.INVALID_ARGUMENT: RequestError,
    grpc.StatusCode.NOT_FOUND: UnknownModelError,
    grpc.StatusCode.PERMISSION_DENIED: AccessError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFullError,
    grpc.StatusCode.UNAUTHENTICATED: AccessError,
    grpc.StatusCode.UNAVAILABLE: ServiceUnavailableError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedTaskError,
}


@contextmanager
def own_errors() -> Iterator[None]:
    """Raise the service's error for a call that fails inside."""
    try:
        yield
    except grpc.RpcError as error:  # grpc.aio's error is one too
        code, details = error.code(), error.details()
        raise ERRORS.get(code, RequestFailedError)(details or str(code)) from error
