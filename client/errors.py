"""Convert gRPC statuses to the service's errors; the gRPC error is their ``__cause__``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from ..errors import (
    AccessError,
    CarryallError,
    QueueFullError,
    RequestCancelled,
    RequestError,
    RequestFailedError,
    ServiceUnavailableError,
    UnknownModelError,
    UnsupportedTaskError,
)


class CallTimeoutError(RequestCancelled, TimeoutError):
    """The call did not finish within its ``timeout``."""


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
    """Convert a gRPC error that is raised inside to the service's error."""
    try:
        yield
    except grpc.RpcError as error:  # also the base class of grpc.aio's errors
        code, details = error.code(), error.details()
        raise ERRORS.get(code, RequestFailedError)(details or str(code)) from error
