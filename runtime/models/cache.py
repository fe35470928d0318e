"""Folders made from other things and kept for the next time: exported packages, lowered graphs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...providers.host.machine import cache_root

_log = logging.getLogger(__name__)

_RECORD = "entry.json"
_ABANDONED_SECONDS = 24 * 3600
_IN_USE_SECONDS = 3600  # whoever was given a folder this lately may yet open its files
_DEFAULT_LIMIT_GB = 32.0
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_GRAPH_CODE = ("exporter", "graph_opt", "providers")
_LIBRARIES = ("carryall", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "openvino")


def cache_folder() -> Path:
    """``CARRYALL_CACHE``, or ``~/.cache/carryall``."""
    return cache_root()


def cache_key(**facts: Any) -> str:
    """A name for what is made from ``facts`` by the libraries and the code installed here."""
    known = {**facts, "versions": _versions(), "code": _code()}
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:32]


def cached_folder(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """The folder of that key, built if there is none or its files are not what was written.

    Several processes may ask at once: each builds under a temporary name, and the first rename wins. Where a
    kind then takes more than ``CARRYALL_CACHE_GB`` (32), its folders unused for longest go.

    Args:
        kind: a folder of the cache, such as ``lowered``.
        key: see ``cache_key``.
        build: writes files into the empty folder it is given.

    Raises:
        UsageError: ``CARRYALL_CACHE_GB`` is no size.
    """
    limit = _limit_bytes()
    folder = cache_folder() / kind / key
    if folder.is_dir():
        if _intact(folder):
            _mark_used(folder)
            return folder
        _log.warning("cache entry %s is damaged and made again", folder)
        _discard(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    scratch = folder.parent / f".{key}.{uuid.uuid4().hex[:8]}"
    scratch.mkdir()
    try:
        build(scratch)
        _write_record(scratch)
        _publish(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _evict(folder.parent, limit)
    return folder


def _limit_bytes() -> float:
    text = os.environ.get("CARRYALL_CACHE_GB") or str(_DEFAULT_LIMIT_GB)
    with contextlib.suppress(ValueError):
        if (size := float(text)) >= 0:
            return size * 1e9
    raise UsageError(f"CARRYALL_CACHE_GB is {text!r}; it must be a number of gigabytes, 0 or more")


def _mark_used(folder: Path) -> None:
    with contextlib.suppress(OSError):  # a cache that may only be read, or an entry evicted just now
        os.utime(folder / _RECORD)


def _evict(parent: Path, limit: float) -> None:
    """Delete what was used longest ago, until the rest fits; what is in use stays."""
    entries = []
    for record in parent.glob(f"[!.]*/{_RECORD}"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # gone, damaged
            files = json.loads(record.read_text(encoding="utf-8"))
            entries.append((record.stat().st_mtime, record.parent, sum(f["size"] for f in files.values())))
    excess = sum(size for _, _, size in entries) - limit
    for used, folder, size in sorted(entries):
        if excess <= 0 or time.time() - used < _IN_USE_SECONDS:
            return
        _log.info("cache entry %s goes: the cache is %.1f GB over its limit", folder, excess / 1e9)
        _discard(folder)
        excess -= size


def _publish(scratch: Path, folder: Path) -> None:
    try:
        scratch.rename(folder)
    except OSError:  # somebody else was first
        if not _intact(folder):
            raise


def _sweep(parent: Path) -> None:
    """Delete what killed processes left half-built."""
    for path in parent.glob(".*"):
        with contextlib.suppress(FileNotFoundError):  # somebody else sweeps too
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _discard(folder: Path) -> None:
    """Move a folder out of the way before deleting it, so that nobody opens half of it."""
    doomed = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}"
    with contextlib.suppress(
        FileNotFoundError, PermissionError
    ):  # another was faster; open files, on Windows
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _write_record(folder: Path) -> None:
    files = {str(path.relative_to(folder)): _facts(path) for path in folder.rglob("*") if path.is_file()}
    (folder / _RECORD).write_text(json.dumps(files, indent=1), encoding="utf-8")


def _facts(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": _sha256(path)}


def _intact(folder: Path) -> bool:
    try:
        files = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        return all(_unchanged(folder / name, facts) for name, facts in files.items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _unchanged(path: Path, facts: Mapping[str, Any]) -> bool:
    """Compare size and time; only a file touched since it was written is read."""
    stat = path.stat()
    if stat.st_size != facts["size"]:
        return False
    return bool(stat.st_mtime_ns == facts["mtime_ns"] or _sha256(path) == facts["sha256"])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _versions() -> dict[str, str]:
    versions = {}
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _code() -> list[tuple[str, int, int]]:
    """What tells states of the graph-writing code apart; the version of a checkout stays the same."""
    paths = [path for name in _GRAPH_CODE for path in (_PACKAGE_ROOT / name).rglob("*.py")]
    stats = {path: path.stat() for path in sorted(paths)}
    return [(path.name, stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()]
