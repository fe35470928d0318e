"""The cache of exported packages, lowered graphs and other built folders."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .distributions import distribution_folder, distribution_version
from .manifest import find_damage, make_manifest, read_manifest
from .root import cache_root, unusable
from .scratch import folder_beside, lock_of
from .writing import writing

if TYPE_CHECKING:
    import filelock

_log = logging.getLogger(__name__)

RECORD = "entry.json"
_DELETED = ".deleted"
_ADVICE = "(carryall rm frees some, CARRYALL_CACHE chooses another folder)"
_KEPT_NAME = 40  # characters; a longer name could not be made longer
IN_USE_SECONDS = 3600  # an entry returned within this time may still have files to be opened
_DEFAULT_LIMIT_GB = 32.0
# The number of the form of everything in the cache. Raise it with each change of an exporter, a pass or a
# kernel's layout that changes what is written, so that what an earlier version wrote is made again.
FORMAT = 49
_PACKAGE_ROOT = Path(__file__).resolve().parents[1]
_GRAPH_CODE = ("exporter", "graph_opt", "providers")
_LIBRARIES = ("onnxruntime", "onnxruntime-gpu", "openvino")  # what they can run decides what is lowered


def cache_key(**facts: Any) -> str:
    """Return the cache key of a result made from ``facts`` in the present form, for the installed libraries.

    ``CARRYALL_CACHE_CODE=1`` adds a hash of the code that writes graphs, for those who change it.
    """
    code = _code() if os.environ.get("CARRYALL_CACHE_CODE") == "1" else ""
    known = {**facts, "versions": _versions(), "format": FORMAT, "code": code}
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:32]


def cached_folder(
    kind: str, key: str, build: Callable[[Path], None], about: Mapping[str, Any] | None = None
) -> Path:
    """Return the folder of a key; build it if it is missing or damaged.

    Several processes may build at once: each uses a temporary name, and the first rename wins. If the kind
    then exceeds ``CARRYALL_CACHE_GB`` (32 GB), its least recently used entries are deleted.

    Args:
        kind: a folder of the cache, such as ``lowered``.
        key: see ``cache_key``.
        build: writes files into the empty folder that it is given.
        about: a description of the entry for people, as JSON values.

    Raises:
        UsageError: ``CARRYALL_CACHE_GB`` is not a size, or the cache folder cannot be used.
        OSError: a file cannot be written, for instance on a full disk; the partial folder is deleted.
    """
    limit = limit_bytes()
    found = intact_folder(kind, key)
    if found is not None:
        return found
    folder = cache_root() / kind / key
    with _advising(folder), contextlib.ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            sweep_deleted(folder.parent)
            scratch = stack.enter_context(folder_beside(folder, folder))
        except OSError as error:
            raise unusable(error) from error
        build(scratch)
        _write_record(scratch, kind, key, about or {})
        _publish(scratch, folder)
    _evict(folder.parent, limit)
    return folder


@contextlib.contextmanager
def _advising(folder: Path) -> Iterator[None]:
    """Say in the error of a full disk what to do, if it is about ``folder``: nobody chose it."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full or error.filename is None or not Path(os.fsdecode(error.filename)).is_relative_to(folder):
            raise
        raise OSError(error.errno, f"{error.strerror} {_ADVICE}", error.filename) from error


def intact_folder(kind: str, key: str) -> Path | None:
    """Return the folder of a key; None if it is missing, or was damaged and is deleted.

    Raises:
        UsageError: the cache folder cannot be used.
    """
    folder = cache_root() / kind / key
    if not _exists(folder):
        return None
    wrong = _damage(folder)
    if wrong is None:
        _mark_used(folder)
        return folder
    _log.warning("cache entry %s is damaged and is built again: %s", folder, wrong)
    discard(folder)
    return None


class CachedParts:
    """The folders of the parts of a long computation: what is killed and run again goes on at its next part.

    A second process that computes the same meanwhile has parts of its own, since the first deletes them.

    Args:
        kind: see ``cached_folder``.
        facts: everything except the code that the parts depend on.
    """

    def __init__(self, kind: str, facts: Mapping[str, Any]) -> None:
        self._kind, self._facts = kind, dict(facts)
        self._folders: list[Path] = []
        self._lock = _lock_of(cache_root() / kind / f".{cache_key(**facts)}.lock")
        if self._lock is None:
            self._facts["run"] = uuid.uuid4().hex

    def is_kept(self, part: str) -> bool:
        """Whether a part is there. Errors are those of ``intact_folder``."""
        return intact_folder(self._kind, self._key(part)) is not None

    def folder(self, part: str, build: Callable[[Path], None]) -> Path:
        """Return the folder of a part; build it if it is missing. Errors are those of ``cached_folder``."""
        folder = cached_folder(self._kind, self._key(part), build)
        self._folders.append(folder)
        return folder

    def close(self, *, delete: bool) -> None:
        """Free the parts for other processes; ``delete`` those that nothing needs any longer."""
        for folder in self._folders if delete else ():
            discard(folder)
        if self._lock is not None:
            self._lock.release()  # the file stays: another process may be about to lock it

    def _key(self, part: str) -> str:
        return cache_key(**self._facts, part=part)


def _lock_of(file: Path) -> filelock.BaseFileLock | None:
    """Return the lock of a file; None if another process holds it, or the file system has none."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        return lock_of(file)
    return None


def _exists(folder: Path) -> bool:
    try:
        return folder.exists()
    except OSError as error:  # a parent that may not be searched, or a name that is too long
        raise unusable(error) from error


def limit_bytes() -> float:
    """Return the size limit of a kind of entries in bytes: ``CARRYALL_CACHE_GB``, 32 GB by default.

    Raises:
        UsageError: ``CARRYALL_CACHE_GB`` is not a size.
    """
    text = os.environ.get("CARRYALL_CACHE_GB") or str(_DEFAULT_LIMIT_GB)
    with contextlib.suppress(ValueError):
        if (size := float(text)) >= 0:
            return size * 1e9
    raise UsageError(f"CARRYALL_CACHE_GB is {text!r}; it must be a number of gigabytes, 0 or more")


def _mark_used(folder: Path) -> None:
    with contextlib.suppress(OSError):  # a read-only cache, or an entry deleted by another process
        os.utime(folder / RECORD)


def _evict(parent: Path, limit: float) -> None:
    """Delete the least recently used entries until the rest fits; entries in use stay."""
    entries = []
    for record in parent.glob(f"[!.]*/{RECORD}"):
        with contextlib.suppress(OSError, ValueError):  # deleted meanwhile, or damaged
            files = read_manifest(read_entry(record.parent)["files"])
            size = sum(share_of(record.parent / name) for name in files)
            entries.append((record.stat().st_mtime, record.parent, size))
    excess = sum(size for _, _, size in entries) - limit
    for used, folder, size in sorted(entries):
        if excess <= 0 or time.time() - used < IN_USE_SECONDS:
            return
        _log.info("cache entry %s is deleted: the cache exceeds its limit by %.1f GB", folder, excess / 1e9)
        discard(folder)
        excess -= size


def share_of(file: Path) -> int:
    """Return the bytes of a file on the disk, divided by its names: several entries may have it in common.

    Raises:
        OSError: there is no such file.
    """
    stat = file.stat()
    return stat.st_size // max(1, stat.st_nlink)


def _publish(scratch: Path, folder: Path) -> None:
    try:
        scratch.rename(folder)
    except OSError:  # another process was faster
        if _damage(folder) is not None:
            raise
    else:
        _damage(folder)  # its hashes, computed for the record, are now known under its name


def sweep_deleted(parent: Path) -> None:
    """Delete what ``discard`` had renamed when its process was killed."""
    for path in parent.glob(f".*{_DELETED}"):
        _remove(path)


def discard(folder: Path) -> None:
    """Rename a folder, then delete it, so that no process opens a partial one."""
    doomed = folder.parent / f".{folder.name[:_KEPT_NAME]}.{uuid.uuid4().hex[:8]}{_DELETED}"
    # FileNotFoundError: another process was faster. PermissionError: its files are open, on Windows.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        folder.rename(doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _write_record(folder: Path, kind: str, key: str, about: Mapping[str, Any]) -> None:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: asdict(facts) for name, facts in make_manifest(folder, names, sums=True).items()}
    content = {"kind": kind, "key": key, "about": about, "files": files}
    with writing(folder / RECORD):
        (folder / RECORD).write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")


def read_entry(folder: Path) -> dict[str, Any]:
    """Return the record of an entry.

    Raises:
        OSError: the record cannot be read.
        ValueError: it is missing, damaged or of another version.
    """
    if not (folder / RECORD).is_file():  # reading a pipe would block
        raise ValueError(f"{RECORD} is missing or not a regular file")
    try:
        content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(content, dict) or content.keys() != {"kind", "key", "about", "files"}:
        raise ValueError(f"{RECORD} has another version")
    return content


def _damage(folder: Path) -> str | None:
    """Return what is wrong with an entry, None if it is complete and unchanged."""
    try:
        content = read_entry(folder)
        files = read_manifest(content["files"])
    except (OSError, ValueError) as error:
        return f"{RECORD} cannot be read: {error}"
    if (content["kind"], content["key"]) != (folder.parent.name, folder.name):
        return f"{RECORD} belongs to {content['kind']}/{content['key']}"
    return next((f"{name} {wrong}" for name, wrong in find_damage(folder, files)), None)


@functools.cache
def _versions() -> dict[str, str]:
    folders = {name: distribution_folder(name) for name in _LIBRARIES}
    return {name: distribution_version(folder) for name, folder in folders.items() if folder is not None}


@functools.cache
def _code() -> str:
    """Return a hash of the code that writes graphs."""
    digest = hashlib.sha256()
    for folder in (folder for name in _GRAPH_CODE for folder in sorted(os.walk(_PACKAGE_ROOT / name))):
        for name in sorted(name for name in folder[2] if name.endswith(".py")):
            path = os.path.join(folder[0], name)
            with open(path, "rb") as file:
                content = file.read()
            digest.update(f"{os.path.relpath(path, _PACKAGE_ROOT)} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()
