"""Store responses in memory for later requests. They are lost when the process ends."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from .....errors import UnknownModelError

Json = dict[str, Any]


class UnknownResponseError(UnknownModelError):
    """No stored response has this id, or it belongs to another caller."""


@dataclass(slots=True)
class StoredResponse:
    """A response and the state to continue its conversation.

    Args:
        response: the JSON object for clients.
        turns: the messages of the conversation, including the answer.
        items: the input items.
        owner: the name of the API key that created it; None if keys are off.
        task: the task that generates it in the background; None if it ran in the foreground.
    """

    response: Json
    turns: list[Json]
    items: list[Json]
    owner: str | None
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class ResponseStore:
    """The most recently used responses, by id.

    Args:
        most: the maximum number of responses.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def add(self, stored: StoredResponse) -> None:
        """Store a response. If the store is full, remove the least recently used one."""
        self._stored[stored.response["id"]] = stored
        while len(self._stored) > self._most:
            _, old = self._stored.popitem(last=False)
            if old.task is not None:
                old.task.cancel()

    def get(self, name: str, owner: str | None) -> StoredResponse:
        """Return a response.

        Raises:
            UnknownResponseError: this owner has no response with this id.
        """
        found = self._stored.get(name)
        if found is None or found.owner != owner:
            raise UnknownResponseError(
                f"there is no response '{name}'; the service keeps the latest {self._most} until it stops"
            )
        self._stored.move_to_end(name)
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def drop(self, name: Any) -> None:
        """Remove a response, if it is there; its task goes on."""
        if isinstance(name, str):
            self._stored.pop(name, None)

    def remove(self, name: str, owner: str | None) -> None:
        """Remove a response and cancel its task.

        Raises:
            UnknownResponseError: this owner has no response with this id.
        """
        found = self.get(name, owner)
        if found.task is not None:
            found.task.cancel()
        del self._stored[name]
