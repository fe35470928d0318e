"""Interfaces for observing the service's requests; ``telemetry`` implements them."""

from __future__ import annotations

from typing import Protocol

from ...types.outputs import RequestMetrics
from .messages import Delta, GenerationRequest


class RequestObserver(Protocol):
    """Follows one request."""

    def delta(self, delta: Delta, metrics: RequestMetrics | None) -> None:
        """Record a delta of the request."""

    def ended(self, error: BaseException | None) -> None:
        """Record the end of the request, and the error or cancellation that ended it."""


class Observer(Protocol):
    """Follows all requests of a service."""

    def begin(self, model: str, request: GenerationRequest) -> RequestObserver | None:
        """Record that a request was accepted, and return its observer; None if it needs none."""


class Observers:
    """Passes everything to each of several observers."""

    def __init__(self) -> None:
        self._all: list[Observer] = []

    def add(self, observer: Observer) -> None:
        """Add an observer of the requests that begin from now on."""
        self._all.append(observer)

    def begin(self, model: str, request: GenerationRequest) -> RequestObserver | None:
        """See ``Observer``."""
        begun = [observer.begin(model, request) for observer in self._all]
        found = [one for one in begun if one is not None]
        return found[0] if len(found) == 1 else _Several(found) if found else None


class _Several:
    """The observers of one request."""

    def __init__(self, each: list[RequestObserver]) -> None:
        self._each = each

    def delta(self, delta: Delta, metrics: RequestMetrics | None) -> None:
        for one in self._each:
            one.delta(delta, metrics)

    def ended(self, error: BaseException | None) -> None:
        for one in self._each:
            one.ended(error)
