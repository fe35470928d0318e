"""Files that clients upload, and those that batches write for them."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import RequestError, UnknownObjectError
from .records import Record, Records

Json = dict[str, Any]

BATCH, BATCH_OUTPUT = "batch", "batch_output"
LEAST_SECONDS, MOST_SECONDS = 3600, 30 * 24 * 3600  # until a file expires, as OpenAI has them
MOST_FILES = 10_000
_CONTENT = "content"


@dataclass(slots=True, kw_only=True)
class StoredFile(Record):
    """A file; see https://platform.openai.com/docs/api-reference/files/object."""

    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    def to_json(self) -> Json:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """Files in a folder. Thread-safe.

    Args:
        folder: where they lie.

    Raises:
        UsageError: the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._records = Records(folder / "files", lambda data: StoredFile(**data), "file")
        self._uploads = folder / "uploads"
        self._uploads.mkdir(exist_ok=True)
        for left in self._uploads.iterdir():  # of uploads that were cut off
            left.unlink()

    def upload_path(self) -> Path:
        """Where a file may be written before it is added; what is left there is deleted by the next start."""
        return self._uploads / secrets.token_hex(12)

    def add(
        self,
        content: Path,
        *,
        filename: str,
        purpose: str,
        owner: str | None,
        name: str | None = None,
        expires_after: int | None = None,
    ) -> StoredFile:
        """Take over a file, which is moved.

        Args:
            content: the file; on the disk of this store.
            filename: its name for clients.
            purpose: ``batch`` or ``batch_output``.
            owner: whose it is.
            name: its id; None makes one. A file of the same id is replaced.
            expires_after: seconds until it is deleted; None keeps it.

        Raises:
            OSError: the disk is full.
        """
        now = int(time.time())
        record = StoredFile(
            id=name or f"file-{secrets.token_hex(12)}",
            owner=owner,
            made=self._records.moment(),
            filename=filename,
            purpose=purpose,
            bytes=content.stat().st_size,
            created_at=now,
            expires_at=None if expires_after is None else now + expires_after,
        )
        self._records.folder(record.id).mkdir(exist_ok=True)
        os.replace(content, self.path(record))
        self._records.put(record)
        return record

    def path(self, file: StoredFile) -> Path:
        """Where its content lies."""
        return self._records.folder(file.id) / _CONTENT

    def get(self, name: str, owner: str | None) -> StoredFile:
        """A file.

        Raises:
            UnknownObjectError: there is none of this id, or no longer.
        """
        self._expire()
        return self._records.get(name, owner)

    def content(self, name: str, owner: str | None) -> Path:
        """The content of a file.

        Raises:
            UnknownObjectError: there is none of this id, or no longer.
        """
        path = self.path(self.get(name, owner))
        if not path.is_file():
            raise UnknownObjectError(f"there is no content of the file '{name}' any more")
        return path

    def delete(self, name: str, owner: str | None) -> None:
        """Delete a file.

        Raises:
            UnknownObjectError: there is none of this id.
        """
        self._records.remove(self.get(name, owner).id)

    def page(
        self,
        owner: str | None,
        *,
        after: str | None = None,
        limit: int = MOST_FILES,
        newest_first: bool = True,
        purpose: str | None = None,
    ) -> tuple[list[Json], bool]:
        """A piece of the list of files, and whether there are more; see ``Records.page``."""
        self._expire()
        if purpose is None:
            found, more = self._records.page(owner, after=after, limit=limit, newest_first=newest_first)
            return [file.to_json() for file in found], more
        found, _ = self._records.page(owner, after=after, limit=MOST_FILES**2, newest_first=newest_first)
        chosen = [file.to_json() for file in found if file.purpose == purpose]
        return chosen[:limit], len(chosen) > limit

    def _expire(self) -> None:
        now = time.time()
        for file in self._records.all():
            if file.expires_at is not None and file.expires_at <= now:
                self._records.remove(file.id)


def expiry_seconds(name: str, given: Any) -> int | None:
    """Read ``expires_after`` or ``output_expires_after``.

    Raises:
        RequestError: it is not ``{"anchor": "created_at", "seconds": ...}`` with an hour to 30 days.
    """
    if given is None:
        return None
    seconds = given.get("seconds") if isinstance(given, dict) else None
    if isinstance(seconds, str) and seconds.isdecimal():  # in a form everything is a text
        seconds = int(seconds)
    known = isinstance(given, dict) and given.get("anchor") == "created_at"
    if not known or type(seconds) is not int or not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise RequestError(
            f"'{name}' must be {{'anchor': 'created_at', 'seconds': {LEAST_SECONDS} to {MOST_SECONDS}}}, "
            f"not {given!r}"
        )
    return seconds
