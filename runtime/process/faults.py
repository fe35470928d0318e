"""Faults of code that works for one request, told without the request's text."""

from __future__ import annotations

import logging
import traceback

from ...errors import CarryallError


def fault_text(what: str, error: BaseException) -> str:
    """One line for whoever sent the request."""
    return str(error) if isinstance(error, CarryallError) else f"{what} failed: {error!r}"


def log_fault(log: logging.Logger, request_id: str, what: str, error: BaseException) -> None:
    """Log where a request's fault arose; not the error's own words, since these may quote the request."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in reversed(frames))
    log.error("request %s: %s failed: %s in %s", request_id, what, type(error).__name__, places)
