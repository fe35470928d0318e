"""Store of files that clients upload and of batch outputs."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Any

from ....errors import RequestError, UnknownObjectError
from ....records import dataclass
from .records import Record, Records

Json = dict[str, Any]

BATCH, BATCH_OUTPUT = "batch", "batch_output"
LEAST_SECONDS, MOST_SECONDS = 3600, 30 * 24 * 3600  # limits of expires_after, as in OpenAI's API
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
        """Return OpenAI's file object."""
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
        folder: the folder of the store.

    Raises:
        UsageError: the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._records = Records(folder / "files", lambda data: StoredFile(**data), "file")
        self._uploads = folder / "uploads"
        self._uploads.mkdir(exist_ok=True)
        for left in self._uploads.iterdir():  # left by interrupted uploads
            left.unlink()

    def upload_path(self) -> Path:
        """Return a new path for an upload; files that are left there are deleted at the next start."""
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
        """Move a file into the store, and return its record.

        Args:
            content: the file, on the same file system as the store.
            filename: the file name for clients.
            purpose: ``batch`` or ``batch_output``.
            owner: the name of the owner's API key; None without API keys.
            name: the id; None makes one. A file with the same id is replaced.
            expires_after: seconds until the file is deleted; None keeps it.

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
        """Return the path of a file's content."""
        return self._records.folder(file.id) / _CONTENT

    def get(self, name: str, owner: str | None) -> StoredFile:
        """Return a file's record.

        Raises:
            UnknownObjectError: there is no file of this id, or it has expired.
        """
        self._expire()
        return self._records.get(name, owner)

    def content(self, name: str, owner: str | None) -> Path:
        """Return the path of a file's content.

        Raises:
            UnknownObjectError: there is no file of this id, it has expired, or its content is missing.
        """
        path = self.path(self.get(name, owner))
        if not path.is_file():
            raise UnknownObjectError(f"the content of the file '{name}' no longer exists")
        return path

    def delete(self, name: str, owner: str | None) -> None:
        """Delete a file.

        Raises:
            UnknownObjectError: there is no file of this id.
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
        """Return a page of the owner's files, and whether there are more; see ``Records.page``."""
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


def expiry_seconds(name: str, expiry: Any) -> int | None:
    """Return the seconds of ``expires_after`` or ``output_expires_after``.

    Raises:
        RequestError: it is not ``{"anchor": "created_at", "seconds": N}`` with N from 1 hour to 30 days.
    """
    if expiry is None:
        return None
    seconds = expiry.get("seconds") if isinstance(expiry, dict) else None
    if isinstance(seconds, str) and seconds.isdecimal():  # form values are strings
        seconds = int(seconds)
    known = isinstance(expiry, dict) and expiry.get("anchor") == "created_at"
    if not known or type(seconds) is not int or not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise RequestError(
            f"'{name}' must be {{'anchor': 'created_at', 'seconds': {LEAST_SECONDS} to {MOST_SECONDS}}}, "
            f"not {expiry!r}"
        )
    return seconds
