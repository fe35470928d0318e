"""Status codes of errors: one table for all transports."""

from __future__ import annotations

from ....errors import (
    AccessError,
    CarryallError,
    EngineClosedError,
    QueueFullError,
    RequestCancelled,
    ServiceUnavailableError,
    UnknownModelError,
    UnknownObjectError,
    UnsupportedTaskError,
    UsageError,
)
from ....records import dataclass


@dataclass(frozen=True, slots=True)
class Status:
    """The status codes of an error class.

    Args:
        grpc: the name of a ``grpc.StatusCode``.
        http: the status code of an HTTP response.
    """

    grpc: str
    http: int


# The first class in this order that an error is an instance of gives its status.
STATUS: dict[type[CarryallError], Status] = {
    UnknownModelError: Status("NOT_FOUND", 404),
    UnknownObjectError: Status("NOT_FOUND", 404),
    UnsupportedTaskError: Status("UNIMPLEMENTED", 501),
    UsageError: Status("INVALID_ARGUMENT", 400),
    QueueFullError: Status("RESOURCE_EXHAUSTED", 429),
    AccessError: Status("PERMISSION_DENIED", 403),
    ServiceUnavailableError: Status("UNAVAILABLE", 503),
    EngineClosedError: Status("UNAVAILABLE", 503),
    RequestCancelled: Status("CANCELLED", 499),
    CarryallError: Status("INTERNAL", 500),
}


def status_of(error: CarryallError) -> Status:
    """Return the status of an error."""
    return next(status for kind, status in STATUS.items() if isinstance(error, kind))
