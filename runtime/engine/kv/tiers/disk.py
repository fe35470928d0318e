"""The disk tier: KV chunks in files, which survive a restart and are shared between processes."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...requests.chunk import Parts, size_of
from .kv_file import DamagedFileError, file_name, read_chunk, write_chunk

_log = logging.getLogger(__name__)

_ABANDONED_SECONDS = 3600
_SHRINK_TO = 0.9  # of the budget, so that the folder is not scanned at every write


class DiskTier:
    """Chunks in files, written by a background thread. The least recently used files are deleted first.

    Several processes may share a folder: writes are atomic, and a file that another process deleted counts as
    missing. File names and content are authenticated with keyed hashes, so nobody without the secret can
    inject KV. Damaged files are deleted. An OSError while writing loses the chunk; any other exception
    disables the tier.

    Args:
        folder: holds the files; created if missing.
        max_bytes: maximum size of all files together, including those of other processes.
        secret: the key shared by all users of the folder; see ``storage.secret.kv_key``.
        max_pending_bytes: maximum size of chunks that are not written yet; further chunks are dropped.

    Attributes:
        given_up: number of chunks that were dropped.
        disabled: why the tier was disabled; empty while it works.

    Raises:
        OSError: the folder cannot be created or read.
    """

    shared = False

    def __init__(self, folder: Path, max_bytes: int, secret: bytes, max_pending_bytes: int = 2**29) -> None:
        self._secret = secret
        folder.mkdir(parents=True, exist_ok=True)
        self.given_up = 0
        self._is_told = False  # that files cannot be written, since one could
        self.disabled = ""
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_pending_bytes = max_pending_bytes
        self._pending: dict[bytes, Parts] = {}  # guarded by _change, as are the next two
        self._pending_bytes = 0
        self._closed = False
        self._change = threading.Condition()
        self._sweep()
        self._held_bytes = sum(stat.st_size for _, stat in self._files())
        if self._held_bytes > max_bytes:
            self._shrink()
        self._thread = threading.Thread(target=self._write, name="carryall-kv-files", daemon=True)
        self._thread.start()

    def __contains__(self, key: bytes) -> bool:
        # os.path.exists is False without permission, where Path.exists would raise
        return key in self._pending or (not self.disabled and os.path.exists(self.path(key)))

    def held(self, keys: Sequence[bytes]) -> int:
        """Return how many first chunks are there."""
        return next((i for i, key in enumerate(keys) if key not in self), len(keys))

    def last_held(self, keys: Sequence[bytes]) -> int:
        """See ``Tier``."""
        return next((i for i in range(len(keys), 0, -1) if keys[i - 1] in self), 0)

    def near(self, key: bytes) -> bool:
        """See ``Tier``."""
        return key in self

    def get(self, key: bytes, ahead: Sequence[bytes] = ()) -> Parts | None:
        """Return the chunk, mapped from its file; None if it is missing, damaged or unreadable."""
        with self._change:
            pending = self._pending.get(key)
        if pending is not None:
            return pending
        if self.disabled:
            return None
        path = self.path(key)
        try:
            parts = read_chunk(path, key, self._secret)
        except FileNotFoundError:
            return None
        except DamagedFileError as error:
            _log.warning("the prefix cache file %s is deleted: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        except OSError as error:  # may be temporary, such as too many open files: keep the file
            _log.warning("the prefix cache file %s cannot be read: %s", path, error)
            return None
        with contextlib.suppress(OSError):  # in a read-only folder the order of use is not recorded
            os.utime(path)
        return parts

    def put(self, key: bytes, parts: Parts, *, wait: bool = False) -> None:
        """Queue a chunk for writing; if the queue is full, ``wait`` for room or drop the chunk."""
        size = size_of(parts)

        def has_room() -> bool:
            return not self._closed and self._pending_bytes + size <= self._max_pending_bytes

        with self._change:
            if wait:
                self._change.wait_for(lambda: has_room() or not self._pending)
            if not has_room():
                self.given_up += 1
                return
            if key not in self._pending:
                self._pending[key] = parts
                self._pending_bytes += size
                self._change.notify_all()

    def flush(self, seconds: float | None = None) -> bool:
        """Wait until all queued chunks are written; return whether they are after so many seconds."""
        with self._change:
            return self._change.wait_for(lambda: not self._pending, seconds)

    def close(self) -> None:
        """Write all queued chunks, and end the thread."""
        with self._change:
            self._max_pending_bytes = 0
            self._closed = True
            self._change.notify_all()
        self._thread.join()

    def path(self, key: bytes) -> Path:
        """Return the file of a chunk, which need not exist."""
        name = file_name(key, self._secret)
        return self._folder / name[:2] / f"{name}.kv"

    def _write(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._pending or self._closed)
                if not self._pending:
                    return
                key, parts = next(iter(self._pending.items()))
            try:
                self._write_one(key, parts)
            except BaseException as error:  # noqa: BLE001 -- otherwise ``flush`` would wait for ever
                self._disable(f"{type(error).__name__}: {error}")
                return
            with self._change:
                del self._pending[key]
                self._pending_bytes -= size_of(parts)
                self._change.notify_all()

    def _disable(self, reason: str) -> None:
        """Disable the tier: drop all queued chunks, and wake all waiting threads."""
        _log.error("the prefix cache in %s is disabled: %s", self._folder, reason)
        with self._change:
            self.disabled, self._closed = reason, True
            self.given_up += len(self._pending)
            self._pending.clear()
            self._pending_bytes = 0
            self._change.notify_all()

    def _write_one(self, key: bytes, parts: Parts) -> None:
        path = self.path(key)
        try:
            path.parent.mkdir(exist_ok=True)
            self._held_bytes += write_chunk(path, key, parts, self._secret)
            self._is_told = False
            if self._held_bytes > self._max_bytes:
                self._shrink()
        except OSError as error:
            self.given_up += 1
            if not self._is_told:  # a full disk refuses every chunk
                _log.warning("the prefix cache file %s cannot be written: %s", path, error)
            self._is_told = True

    def _shrink(self) -> None:
        """Delete the least recently used files, of any process, until the folder is below its budget."""
        files = sorted(self._files(), key=lambda entry: entry[1].st_mtime_ns)
        self._held_bytes = sum(stat.st_size for _, stat in files)
        for path, stat in files:
            if self._held_bytes <= _SHRINK_TO * self._max_bytes:
                return
            with contextlib.suppress(PermissionError):
                path.unlink(missing_ok=True)
                self._held_bytes -= stat.st_size

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._folder.glob("??/*.kv"):
            with contextlib.suppress(FileNotFoundError):  # another process deleted it
                yield path, path.stat()

    def _sweep(self) -> None:
        """Delete temporary files that killed processes left, where permissions allow it."""
        for path in self._folder.glob("??/*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()
