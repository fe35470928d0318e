"""A store of small JSON records in a folder, read once at the start and written whole."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from ....errors import RequestError, UnknownObjectError, UsageError
from ....plain_json import plain_json
from ....records import dataclass
from ..inputs.files import replacing

MOST_LISTED = 100
_FILE = "record.json"


@dataclass(slots=True, kw_only=True)
class Record:
    """Fields of every record.

    Args:
        id: the unique id.
        owner: the name of the API key that made it; None without API keys. Other owners cannot see it.
        made: the creation time in ns; lists are sorted by it.
    """

    id: str
    owner: str | None
    made: int


R = TypeVar("R", bound=Record)


class Records(Generic[R]):
    """Records by id. Each has its own folder, which also holds its files. Thread-safe.

    Args:
        folder: the folder of all records; created if it does not exist.
        read: returns the record of a JSON document.
        what: the kind of the records, for error messages.

    Raises:
        UsageError: the folder cannot be used.
    """

    def __init__(self, folder: Path, read: Callable[[dict[str, Any]], R], what: str) -> None:
        self._folder = folder
        self._what = what
        self._lock = threading.RLock()
        self._last = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            found = [read(json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob(f"*/{_FILE}")]
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"the folder {folder} cannot be used: {error}") from error
        self._records = {record.id: record for record in sorted(found, key=lambda record: record.made)}

    def folder(self, name: str) -> Path:
        """Return the folder of a record."""
        return self._folder / name

    def all(self) -> list[R]:
        """Return all records, oldest first."""
        with self._lock:
            return list(self._records.values())

    def moment(self) -> int:
        """Return the time in ns; each call returns a later time."""
        with self._lock:
            self._last = max(self._last + 1, time.time_ns())
            return self._last

    def put(self, record: R) -> None:
        """Write a new or changed record to the disk."""
        with self._lock:
            self.folder(record.id).mkdir(exist_ok=True)
            with replacing(str(self.folder(record.id) / _FILE)) as stream:
                stream.write(plain_json(asdict(record)).encode())
            self._records[record.id] = record

    def get(self, name: str, owner: str | None) -> R:
        """Return a record.

        Raises:
            UnknownObjectError: the owner has no record of this id.
        """
        with self._lock:
            record = self._records.get(name)
        if record is None or record.owner != owner:
            raise UnknownObjectError(f"there is no {self._what} '{name}'")
        return record

    def remove(self, name: str) -> None:
        """Delete a record with its files."""
        with self._lock:
            self._records.pop(name, None)
            self.folder(name).joinpath(_FILE).unlink(
                missing_ok=True
            )  # first: without it, the folder is ignored
            shutil.rmtree(self.folder(name), ignore_errors=True)

    def page(
        self, owner: str | None, *, after: str | None, limit: int, newest_first: bool = True
    ) -> tuple[list[R], bool]:
        """Return a page of the owner's records, and whether there are more.

        Args:
            owner: the owner of the records.
            after: the id of the record before the page; None begins with the first.
            limit: the maximum number of records.
            newest_first: sort by descending creation time.

        Raises:
            RequestError: ``limit`` is below 1.
            UnknownObjectError: there is no record ``after``.
        """
        if limit < 1:
            raise RequestError(f"'limit' must be at least 1, not {limit}")
        listed = [record for record in self.all() if record.owner == owner]
        if newest_first:
            listed.reverse()
        if after is not None:
            listed = listed[listed.index(self.get(after, owner)) + 1 :]
        return listed[:limit], len(listed) > limit


def page_json(objects: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    """Return a page as OpenAI's list object."""
    return {
        "object": "list",
        "data": objects,
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
        "has_more": more,
    }
