"""What identifies a MODEL, so that a job goes on with the very same one."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from ...exporter.package import COPIED_FILES
from ...progress import Progress
from ..models.model_source import find_model, resolve_model

Stamp = tuple[tuple[str, int, int, int], ...]


def model_identity(
    model: str, *, quantize: str | None = None, progress: Progress | None = None
) -> dict[str, str]:
    """Digests of everything of a model that its answers depend on, by name; equal for equal models.

    Args:
        model: as for ``load_model``; exported and quantized into the cache where that is needed.
        quantize: as there.
        progress: told about every tensor written.

    Raises:
        CarryallError: as ``resolve_model``.
    """
    files = resolve_model(model, quantize=quantize, progress=progress)
    found = {"weights": _hexdigest(files.content_key.encode())}
    for name in COPIED_FILES:
        path = files.folder / name
        if path.is_file():
            found[name] = _hexdigest(path.read_bytes())
    return found


def model_stamp(model: str) -> Stamp:
    """Sizes and times of a model's files where the user keeps it; they change when a file is replaced."""
    path = _located(model)
    return tuple(_facts(file) for file in sorted([path] if path.is_file() else path.iterdir()))


# Asked every second: a hub id is looked up once.
_located = functools.cache(find_model)


def _facts(path: Path) -> tuple[str, int, int, int]:
    stat = path.stat()
    # A copy may keep the time of modification, but not that of the change.
    return path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _hexdigest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
