"""Interfaces for observing the service's requests; ``metrics`` implements them."""

from __future__ import annotations

from typing import Protocol

from ...types.outputs import RequestMetrics
from .messages import Delta, GenerationRequest


class RequestObserver(Protocol):
    """Follows one request."""

    def delta(self, delta: Delta, metrics: RequestMetrics | None) -> None:
        """Record a delta of the request."""

    def ended(self) -> None:
        """Record the end of the request, for any reason."""


class Observer(Protocol):
    """Follows all requests of a service."""

    def begin(self, model: str, request: GenerationRequest) -> RequestObserver:
        """Record that a request was accepted, and return its observer."""
