"""sha256 hashes of files, cached by size, modification time, change time and inode.

A file is hashed again when one of the four differs from when it was last hashed. The kernel sets the change
time, so a write in place is detected even if the modification time is restored. Three changes are not
detected: bits that flip on the medium, writes through a memory map into a page that is already dirty, and
writes made while the clock was set back. ``reread=True`` detects those. Windows has no change time: there a
program that restores the modification time also goes undetected.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader, RawIOBase
from pathlib import Path
from types import TracebackType
from typing import Self

from .root import cache_root

LARGE_BYTES = 64 << 20  # a larger file of the cache is known by the sums of its pages
_PART_BYTES = 64 << 20  # read by one thread
_READ_BYTES = 1 << 20  # a multiple of a page
_FOLDER = "hashes"
_COARSE_CLOCK = 5  # Linux's CLOCK_REALTIME_COARSE, which files are stamped by
# Seconds; two ticks of the clock of files, within which two changes have equal times.
_TICK = 2 * (time.clock_getres(_COARSE_CLOCK) if sys.platform == "linux" else 0.01)
_COARSE = 2.0  # seconds; the resolution of FAT, where times are whole seconds
_BILLION = 10**9
_WHOLE, _SUMS = "", "sums"  # kinds of digests

Stamp = tuple[int, int, int, int]

# Keyed by the kind of hash, device and stamp, so that a renamed file is still known. Used even if the cache
# cannot be written.
_in_process: dict[tuple[str, int, Stamp], str] = {}


class FolderHashes:
    """Compute and cache the sha256 of files of one folder; a context manager that saves new hashes on exit.

    The cache holds one JSON file per folder, replaced atomically. If two processes write at once, the last
    one wins, and the other's hashes are computed again later. If the cache cannot be written, every process
    hashes for itself.

    Args:
        folder: the folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        name = hashlib.sha256(os.fsencode(self._folder)).hexdigest()[:32]
        self._record = cache_root() / _FOLDER / f"{name}.json"
        self._known = self._read()
        self._learned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._learned:
            self._write()

    def sha256(self, name: str, *, reread: bool = False) -> str:
        """Return the sha256 of a file's content, in hexadecimal.

        Args:
            name: the file, relative to the folder.
            reread: hash the content again, even if a cached hash is valid.

        Raises:
            OSError: the file cannot be read.
        """
        return self._digest(name, _whole, reread=reread)

    def sums(self, name: str, *, reread: bool = False) -> str:
        """Return the sha256 of a sum of each page of 4096 bytes, in hexadecimal; all cores compute the sums.

        It tells damage as the sha256 of the content does, at a tenth of its time, but is no secret: whoever
        wants to can make another file of the same sums.

        Args:
            name: as for ``sha256``.
            reread: as for ``sha256``.

        Raises:
            OSError: the file cannot be read.
        """
        return self._digest(name, _by_pages, reread=reread)

    def _digest(self, name: str, compute: Callable[[BufferedReader], str], *, reread: bool) -> str:
        path, kind = self._folder / name, _WHOLE if compute is _whole else _SUMS
        stat = path.stat()
        known = None if reread else self.recall(name, stat).get(kind)
        if known is not None:
            self.learn(name, kind, stat, known)
            return known
        try:
            known, digest = _hash(path, compute)
        except OSError as error:
            error.filename = error.filename or str(path)  # a failed read names no file
            raise
        if digest is not None:
            self.learn(name, kind, digest, known)
        return known

    def recall(self, name: str, stat: os.stat_result) -> dict[str, str]:
        """Return the known digests of a file in its present state, by their kind."""
        found, stamp = dict[str, str](), _stamp(stat)
        for kind in (_WHOLE, _SUMS):
            stored = self._known.get(_entry(name, kind))
            digest = _in_process.get((kind, stat.st_dev, stamp))
            if stored is not None and stored[0] == stamp:
                digest = stored[1]
            if digest is not None:
                found[kind] = digest
        return found

    def learn(self, name: str, kind: str, stat: os.stat_result, digest: str) -> None:
        """Keep a digest of a file in a state that a later write is certain to end."""
        entry = _stamp(stat), digest
        _in_process[kind, stat.st_dev, entry[0]] = digest
        if self._known.get(_entry(name, kind)) != entry:
            self._known[_entry(name, kind)] = entry
            self._learned = True

    def _read(self) -> dict[str, tuple[Stamp, str]]:
        try:
            content = json.loads(self._record.read_text(encoding="utf-8"))
            return {
                name: ((int(size), int(mtime), int(ctime), int(inode)), str(digest))
                for name, (size, mtime, ctime, inode, digest) in content["files"].items()
            }
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return {}

    def _write(self) -> None:
        files = {name: [*stamp, digest] for name, (stamp, digest) in self._known.items()}
        scratch = self._record.with_name(f".{self._record.name}.{uuid.uuid4().hex[:8]}")
        with contextlib.suppress(OSError):  # a cache that cannot be written
            try:
                self._record.parent.mkdir(parents=True, exist_ok=True)
                content = json.dumps({"folder": str(self._folder), "files": files}, indent=1)
                scratch.write_text(content, encoding="utf-8")
                scratch.replace(self._record)
            finally:
                scratch.unlink(missing_ok=True)


def remember_sums(path: Path, sums: str) -> None:
    """Let this process know the ``sums`` of a file that it has just written, so that it does not read it.

    Raises:
        OSError: the file cannot be read.
    """
    stat = path.stat()
    if _wait_for_next_tick(stat) and _stamp(path.stat()) == _stamp(stat):
        _in_process[_SUMS, stat.st_dev, _stamp(stat)] = sums


def link_known(path: Path, name: Path) -> None:
    """Give a file another name. What is known of its content stays known, though its change time moves.

    Args:
        path: the file.
        name: a new name on the same disk.

    Raises:
        OSError: there is no such file, the name is taken, or the file system has no links.
    """
    with FolderHashes(path.parent) as hashes:
        before = path.stat()
        known = hashes.recall(path.name, before)
        os.link(path, name)
        after = path.stat()
        if _stamp(after)[:2] != _stamp(before)[:2]:
            return  # it was changed meanwhile, and is read again
        for kind, digest in known.items():
            hashes.learn(path.name, kind, after, digest)


def content_key(folder: Path, names: Iterable[str]) -> str:
    """Return one sha256 over the names and contents of several files, in hexadecimal.

    Args:
        folder: the folder of the files.
        names: the files, relative to the folder.

    Raises:
        OSError: a file cannot be read.
    """
    with FolderHashes(folder) as hashes:
        known = {name: hashes.sha256(name) for name in sorted(set(names))}
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def forget_missing_folders() -> int:
    """Delete the records of folders that no longer exist, and return how many were deleted."""
    count = 0
    for record in (cache_root() / _FOLDER).glob("*.json"):
        try:
            folder = json.loads(record.read_text(encoding="utf-8"))["folder"]
            gone = not Path(folder).is_dir()
        except (OSError, ValueError, LookupError, TypeError):
            gone = True
        if gone:
            with contextlib.suppress(OSError):
                record.unlink()
                count += 1
    return count


def _entry(name: str, kind: str) -> str:
    return f"{name}\0{kind}" if kind else name


def _stamp(stat: os.stat_result) -> Stamp:
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _whole(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _by_pages(file: BufferedReader) -> str:
    """Return the digest of the sums of pages; the last one is filled with zeros."""
    import numpy as np

    from .page_sums import PAGE_BYTES, Sums, digest_of, sums_of

    def sums(first: int) -> Sums:
        found, at, end = [np.zeros(0, np.uint64)], first, min(first + _PART_BYTES, size)
        buffer = np.zeros(_READ_BYTES, np.uint8)
        with open(file.name, "rb", buffering=0) as own:
            own.seek(first)
            while at < end and (count := _fill(own, buffer.data[: min(_READ_BYTES, end - at)])):
                whole = -(-count // PAGE_BYTES) * PAGE_BYTES
                buffer[count:whole] = 0
                found.append(sums_of(buffer[:whole]))
                at += count
        return np.concatenate(found)

    size = os.fstat(file.fileno()).st_size
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        parts = [np.zeros(0, np.uint64), *pool.map(sums, range(0, size, _PART_BYTES))]
    return digest_of(np.concatenate(parts))


def _fill(file: RawIOBase, view: memoryview) -> int:
    """Read until ``view`` is full or the file ends; return the bytes read."""
    done = 0
    while done < len(view) and (count := file.readinto(view[done:])):
        done += count
    return done


def _hash(path: Path, compute: Callable[[BufferedReader], str]) -> tuple[str, os.stat_result | None]:
    """Return a file's hash, and its stat if that proves that the content did not change meanwhile."""
    with path.open("rb") as file:
        before = os.fstat(file.fileno())
        settled = _wait_for_next_tick(before)
        digest = compute(file)
        after = os.fstat(file.fileno())
    return digest, before if settled and _stamp(before) == _stamp(after) else None


def _wait_for_next_tick(stat: os.stat_result) -> bool:
    """Wait until a later write must get another time stamp; False if that takes longer than two ticks."""
    changed = stat.st_mtime_ns if os.name == "nt" else stat.st_ctime_ns
    age = time.time() - changed / _BILLION
    if changed % _BILLION == 0 and age < _COARSE:
        return False
    if 0 <= age < _TICK:
        time.sleep(_TICK - age)
    return age >= 0  # a time in the future: the clocks differ
