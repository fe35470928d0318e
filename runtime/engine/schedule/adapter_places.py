"""The places of LoRA adapters in the runner: which adapter is resident, and which requests use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from ....providers.base import LoraMatrices
from ..requests.request import Request


class AdapterPlaces:
    """Assign places to the adapters of running requests; the least recently used adapter is evicted first.

    An adapter without running requests stays resident until its place is needed.

    Args:
        count: number of places.
        load: loads an adapter's matrices into a place of the runner.
    """

    def __init__(self, count: int, load: Callable[[int, LoraMatrices], None]) -> None:
        self._load = load
        self._free = list(range(count))[::-1]
        self._places: dict[str, int] = {}  # by the adapter's key, least recently used first
        self._users: Counter[str] = Counter()  # running requests by the adapter's key

    @property
    def in_use(self) -> bool:
        """Whether a running request uses an adapter."""
        return bool(self._users)

    def has_place(self, request: Request) -> bool:
        """Whether a request can start: its adapter is resident, or a place is free or not in use."""
        adapter = request.adapter
        return adapter is None or adapter.key in self._places or bool(self._free) or self._idle() is not None

    def take(self, request: Request) -> None:
        """Give a request that starts the place of its adapter; load the adapter if it is not resident."""
        adapter = request.adapter
        if adapter is None:
            return
        place = self._places.pop(adapter.key, None)
        if place is None:
            place = self._vacated()
            self._load(place, adapter.matrices)
        self._places[adapter.key] = place
        self._users[adapter.key] += 1
        request.lora_place = place

    def leave(self, request: Request) -> None:
        """Record that a request no longer runs."""
        adapter = request.adapter
        if adapter is None:
            return
        self._users[adapter.key] -= 1
        if not self._users[adapter.key]:
            del self._users[adapter.key]
        request.lora_place = None

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Check that places and running requests agree.

        Raises:
            RuntimeError: they do not; the message shows the difference.
        """
        used = Counter(request.adapter.key for request in running if request.adapter is not None)
        if used != self._users:
            raise RuntimeError(f"running requests use adapters {dict(used)}, counted are {dict(self._users)}")
        for request in running:
            key = None if request.adapter is None else request.adapter.key
            if request.lora_place != (None if key is None else self._places.get(key)):
                raise RuntimeError(f"{request} has place {request.lora_place}, not that of its adapter")
        if len({*self._free, *self._places.values()}) != len(self._free) + len(self._places):
            raise RuntimeError(f"places {self._free} are free, but also used: {self._places}")

    def _idle(self) -> str | None:
        return next((key for key in self._places if key not in self._users), None)

    def _vacated(self) -> int:
        if self._free:
            return self._free.pop()
        oldest = self._idle()
        if oldest is None:
            raise RuntimeError("no place for an adapter is free; ``has_place`` was not asked")
        return self._places.pop(oldest)
