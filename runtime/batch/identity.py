"""The identity of a model, so that a job resumes with the same model only."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

from ...exporter.adapter import adapter_fingerprint
from ...exporter.package import COPIED_FILES
from ...progress import Progress
from ...storage.hashes import content_key
from ..api.load_encoder import encoder_folder
from ..models.find import find_model
from ..models.model_source import resolve_model

Stamp = tuple[tuple[str, int, int, int], ...]


def model_identity(
    model: str,
    *,
    quantize: str | None = None,
    rope_scaling: str | None = None,
    loras: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Return digests of all parts of a model that its answers depend on, by name.

    Args:
        model: as for ``load_model``; exported and quantized into the cache where needed.
        quantize: as for ``load_model``.
        rope_scaling: as for ``load_model``.
        loras: folders of LoRA adapters, by name.
        progress: called for every tensor that is written.

    Raises:
        CarryallError: as ``resolve_model``, or an adapter cannot be read.
    """
    if (encoder := encoder_folder(model)) is not None:
        names = [str(path.relative_to(encoder)) for path in sorted(encoder.rglob("*")) if path.is_file()]
        return {"encoder": _hexdigest(content_key(encoder, names).encode())}
    files = resolve_model(model, quantize=quantize, rope_scaling=rope_scaling, progress=progress)
    identity = {"weights": _hexdigest(files.content_key.encode())}
    for name in COPIED_FILES:
        path = files.folder / name
        if path.is_file():
            identity[name] = _hexdigest(path.read_bytes())
    for name, folder in sorted((loras or {}).items()):
        identity[f"lora {name}"] = _hexdigest(adapter_fingerprint(Path(folder)).encode())
    return identity


def model_stamp(model: str) -> Stamp:
    """Return sizes and times of a model's source files; they change when a file is replaced."""
    path = _located(model)
    return tuple(_facts(file) for file in sorted([path] if path.is_file() else path.iterdir()))


# The model is checked every second; a hub id is looked up once.
_located = functools.cache(find_model)


def _facts(path: Path) -> tuple[str, int, int, int]:
    stat = path.stat()
    # A copy may keep st_mtime, but not st_ctime.
    return path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _hexdigest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
