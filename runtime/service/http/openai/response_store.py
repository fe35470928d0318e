"""Store responses in memory for later requests. They are lost when the process ends."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable
from dataclasses import field
from typing import Any

from .....errors import UnknownModelError
from .....records import dataclass
from ...core.chat import Message

Json = dict[str, Any]

MOST_BYTES = 256 * 2**20


class UnknownResponseError(UnknownModelError):
    """No stored response has this id, or it belongs to another caller."""


class EventLog:
    """The events of a response, which several readers can follow, in one event loop."""

    def __init__(self) -> None:
        self._events: list[bytes] = []  # the event with ``sequence_number`` n is at n
        self._ended = False
        self._news = asyncio.Event()
        self.bytes = 0

    def add(self, events: Iterable[bytes]) -> None:
        """Append events."""
        known = len(self._events)
        self._events += events
        self.bytes += sum(map(len, self._events[known:]))
        self._wake()

    def end(self) -> None:
        """End the log; no event follows."""
        self._ended = True
        self._wake()

    async def after(self, number: int) -> AsyncGenerator[bytes, None]:
        """Yield the events after the one with this ``sequence_number``, until the log ends."""
        position = number + 1
        while True:
            news = self._news
            if position < len(self._events):
                piece = b"".join(self._events[position:])
                position = len(self._events)
                yield piece
            elif self._ended:
                return
            else:
                await news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


@dataclass(slots=True)
class StoredResponse:
    """A response and the state to continue its conversation.

    Args:
        response: the JSON object for clients.
        messages: the conversation, including the answer.
        items: the input items.
        owner: the name of the API key that created it; None if keys are off.
        task: the task that generates it in the background; None if it ran in the foreground.
        log: its events; None if it was not created with ``stream`` and ``background``.
    """

    response: Json
    messages: list[Message]
    items: list[Json]
    owner: str | None
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    log: EventLog | None = field(default=None, repr=False)

    def bytes(self) -> int:
        """Return the size of input, response and events as JSON; earlier turns count with their response."""
        return len(json.dumps([self.response, self.items])) + (self.log.bytes if self.log else 0)


class ResponseStore:
    """The most recently used responses, by id.

    Args:
        most: the maximum number of responses.
        most_bytes: their maximum size; a single one may be as large as a request's body.
    """

    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes: dict[str, int] = {}
        self._total = 0

    def add(self, stored: StoredResponse) -> None:
        """Store a response. While the store is too full, remove the least recently used one."""
        name = stored.response["id"]
        self._stored[name], self._bytes[name] = stored, 0
        self.count(stored)

    def count(self, stored: StoredResponse, more: int | None = None) -> None:
        """Note that a response has grown by ``more`` bytes; None counts all of it again.

        It may have been removed.
        """
        name = stored.response["id"]
        if self._stored.get(name) is not stored:
            return
        size = stored.bytes() if more is None else self._bytes[name] + more
        self._total += size - self._bytes[name]
        self._bytes[name] = size
        while len(self._stored) > self._most or self._total > self._most_bytes:
            old = next(iter(self._stored.values()))
            if old.task is not None:
                old.task.cancel()
            self.drop(old.response["id"])

    def get(self, name: str, owner: str | None) -> StoredResponse:
        """Return a response.

        Raises:
            UnknownResponseError: this owner has no response with this id.
        """
        stored = self._stored.get(name)
        if stored is None or stored.owner != owner:
            raise UnknownResponseError(
                f"there is no response '{name}'; the service keeps the latest {self._most} until it stops"
            )
        self._stored.move_to_end(name)
        return stored

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def drop(self, name: Any) -> None:
        """Remove a response, if it is there; its task goes on."""
        if isinstance(name, str) and name in self._stored:
            del self._stored[name]
            self._total -= self._bytes.pop(name)

    def remove(self, name: str, owner: str | None) -> None:
        """Remove a response and cancel its task.

        Raises:
            UnknownResponseError: this owner has no response with this id.
        """
        found = self.get(name, owner)
        if found.task is not None:
            found.task.cancel()
        self.drop(name)
