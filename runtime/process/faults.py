"""Report faults in code that works for one request, without logging the request's text."""

from __future__ import annotations

import logging
import traceback

from ...errors import CarryallError, ProviderError, RequestFailedError


def fault_text(what: str, error: BaseException) -> str:
    """Return the error as one line for the sender of the request."""
    return str(error) if isinstance(error, CarryallError) else f"{what} failed: {error!r}"


def raised_in_thread(what: str, error: BaseException) -> Exception:
    """Return a thread's error for those that wait for it; one that would end them too is wrapped.

    Args:
        what: what the thread did, such as "computes masks".
        error: its error.
    """
    if isinstance(error, Exception):
        return error
    return RequestFailedError(f"the thread that {what} was ended by {error!r}")


def log_fault(log: logging.Logger, request_id: str, what: str, error: BaseException) -> None:
    """Log the type and place of a request's fault; of a device or file also the message.

    Other messages may quote the request.
    """
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in reversed(frames))
    told = isinstance(error, ProviderError | OSError)
    name = f"{type(error).__name__}: {error}" if told else type(error).__name__
    log.error("request %s: %s failed: %s in %s", request_id, what, name, places)
