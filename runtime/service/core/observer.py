"""What is told to whoever watches the service's requests; see ``metrics``."""

from __future__ import annotations

from typing import Protocol

from ...types.outputs import RequestMetrics
from .messages import Delta, GenerationRequest


class RequestObserver(Protocol):
    """Follows one request."""

    def delta(self, delta: Delta, metrics: RequestMetrics | None) -> None:
        """The request gained something."""

    def ended(self) -> None:
        """No more deltas will come, whatever the reason."""


class Observer(Protocol):
    """Follows all requests of a service."""

    def begin(self, model: str, request: GenerationRequest) -> RequestObserver:
        """A request was taken in."""
