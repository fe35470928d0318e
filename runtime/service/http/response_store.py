"""Responses that were stored, for those who come back to them. They live as long as the process."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from ....errors import UnknownModelError

Json = dict[str, Any]


class UnknownResponseError(UnknownModelError):
    """There is no response of that id, any more or for this caller."""


@dataclass(slots=True)
class StoredResponse:
    """A response and what it takes to continue its conversation.

    Args:
        response: the object that clients get.
        turns: of the conversation, the answer included.
        items: the input.
        owner: name of the API key that it was made with.
        task: generates it, if that goes on in the background.
    """

    response: Json
    turns: list[Json]
    items: list[Json]
    owner: str | None
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class ResponseStore:
    """The latest responses, by id.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def add(self, stored: StoredResponse) -> None:
        """Keep a response; the one that was not asked for longest goes where there are too many."""
        self._stored[stored.response["id"]] = stored
        while len(self._stored) > self._most:
            _, old = self._stored.popitem(last=False)
            if old.task is not None:
                old.task.cancel()

    def get(self, name: str, owner: str | None) -> StoredResponse:
        """A response.

        Raises:
            UnknownResponseError: there is none of that id that this owner made.
        """
        found = self._stored.get(name)
        if found is None or found.owner != owner:
            raise UnknownResponseError(
                f"there is no response '{name}'; the latest {self._most} are kept, while the service runs"
            )
        self._stored.move_to_end(name)
        return found

    def remove(self, name: str, owner: str | None) -> None:
        """Forget a response.

        Raises:
            UnknownResponseError: there is none of that id that this owner made.
        """
        found = self.get(name, owner)
        if found.task is not None:
            found.task.cancel()
        del self._stored[name]
