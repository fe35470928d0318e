"""The tier of files: prefixes that survive a restart, shared by all processes that run the same model."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ...requests.chunk import Parts, size_of
from .kv_file import DamagedFileError, file_name, read_chunk, write_chunk

_log = logging.getLogger(__name__)

_ABANDONED_SECONDS = 3600
_SHRINK_TO = 0.9  # of the budget, so that not every write must look for something to delete


class DiskTier:
    """Chunks as files, least recently used deleted first. Files are written by a thread of its own.

    Several processes may use one folder: files appear whole or not at all, and one that disappears meanwhile
    is simply not there. Names and content are authenticated by keyed hashes, so that whoever lacks the secret
    can inject nothing. A damaged file is deleted. If writing raises an OSError, the chunk is lost; any other
    exception disables the tier.

    Args:
        folder: where; made if missing.
        max_bytes: of all files together, the other processes' included.
        secret: shared by all who share the folder; see ``storage.secret.kv_key``.
        max_pending_bytes: of chunks not written yet; beyond that new ones are given up.

    Attributes:
        given_up: chunks that were not kept.
        disabled: why the tier was switched off; empty while it works.
    """

    def __init__(self, folder: Path, max_bytes: int, secret: bytes, max_pending_bytes: int = 2**29) -> None:
        self._secret = secret
        folder.mkdir(parents=True, exist_ok=True)
        self.given_up = 0
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
        # False also where it may not look
        return key in self._pending or (not self.disabled and os.path.exists(self._path(key)))

    def get(self, key: bytes) -> Parts | None:
        """The chunk, mapped from its file."""
        with self._change:
            pending = self._pending.get(key)
        if pending is not None:
            return pending
        if self.disabled:
            return None
        path = self._path(key)
        try:
            parts = read_chunk(path, key, self._secret)
        except FileNotFoundError:
            return None
        except DamagedFileError as error:
            _log.warning("the cached prefix %s is dropped: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        except OSError as error:  # perhaps but for now, such as too many open files
            _log.warning("the cached prefix %s cannot be read: %s", path, error)
            return None
        with contextlib.suppress(OSError):  # a folder that is only read has no order of use
            os.utime(path)
        return parts

    def put(self, key: bytes, parts: Parts, *, wait: bool = False) -> None:
        """Let the thread write a chunk; it is given up if too many wait already and it may not."""
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

    def flush(self) -> None:
        """Return when everything is written."""
        with self._change:
            self._change.wait_for(lambda: not self._pending)

    def close(self) -> None:
        """Write what waits, and end the thread."""
        with self._change:
            self._max_pending_bytes = 0
            self._closed = True
            self._change.notify_all()
        self._thread.join()

    def _path(self, key: bytes) -> Path:
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
            except Exception as error:  # noqa: BLE001 -- whatever it is, nobody may wait for this thread
                self._disable(f"{type(error).__name__}: {error}")
                return
            with self._change:
                del self._pending[key]
                self._pending_bytes -= size_of(parts)
                self._change.notify_all()

    def _disable(self, reason: str) -> None:
        """Give up all that waits, and let go of whoever waits for it."""
        _log.error("the prefix cache in %s is switched off: %s", self._folder, reason)
        with self._change:
            self.disabled, self._closed = reason, True
            self.given_up += len(self._pending)
            self._pending.clear()
            self._pending_bytes = 0
            self._change.notify_all()

    def _write_one(self, key: bytes, parts: Parts) -> None:
        path = self._path(key)
        try:
            path.parent.mkdir(exist_ok=True)
            self._held_bytes += write_chunk(path, key, parts, self._secret)
            if self._held_bytes > self._max_bytes:
                self._shrink()
        except OSError as error:
            self.given_up += 1
            _log.warning("the prefix %s is not kept: %s", path, error)

    def _shrink(self) -> None:
        """Delete the least recently used files, whoever wrote them."""
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
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                yield path, path.stat()

    def _sweep(self) -> None:
        """Delete what killed processes left half-written, as far as that is allowed."""
        for path in self._folder.glob("??/*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()
