"""The libraries of CPU kernels in the cache, in folders named by a hash of sources, flags and compiler."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ...errors import ProviderUnavailableError
from ...storage.manifest import find_damage, make_manifest, read_manifest
from ...storage.root import cache_root, unusable
from ...storage.scratch import folder_beside
from ...storage.writing import write_whole
from .compiler import CompilerError, compile_library, library_name, output_of, required_compiler, sources_key

_RECORD = "library.json"  # size and sha256 of the library beside it


def built_library() -> Path | None:
    """Return the newest library of the cache that was built from these sources, None if there is none.

    Raises:
        ProviderUnavailableError: it is not the file that was built; loading it could run anything.
    """
    found = list((cache_root() / "kernels").glob(f"{sources_key()}-*/{library_name()}"))
    path = max(found, key=lambda path: path.lstat().st_mtime, default=None)
    wrong = None if path is None else _damage(path)
    if wrong is not None:
        raise ProviderUnavailableError(
            f"the CPU kernels {path} are damaged: {wrong}; build them again with `carryall doctor "
            "--build-kernels`, or delete them"
        )
    return path


def _damage(library: Path) -> str | None:
    """Return what is wrong with a library, None if it is unchanged."""
    record = library.with_name(_RECORD)
    try:
        manifest = read_manifest(json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        return f"{_RECORD} cannot be read: {getattr(error, 'strerror', None) or error}"
    if set(manifest) != {library.name}:
        return f"{_RECORD} is not of {library.name}"
    return next((wrong for _, wrong in find_damage(library.parent, manifest)), None)


def build_library(
    target: Path | None = None, *, extra: Sequence[str] = (), machine: str | None = None
) -> Path:
    """Build the library and return it.

    Args:
        target: the file to write; None is the cache.
        extra: more flags for compiling and linking.
        machine: the machine for which the compiler makes programs, see ``compile.flags_of_sources``.

    Raises:
        ProviderUnavailableError: there is no compiler, or it failed.
        UsageError: the cache folder cannot be used.
    """
    try:
        compiler = required_compiler()
        if target is None:
            described = output_of([*compiler, "--version"], "its version")
            key = hashlib.sha256(" ".join([*compiler, described, *extra]).encode()).hexdigest()[:8]
            target = cache_root() / "kernels" / f"{sources_key()}-{key}" / library_name()
        target.parent.mkdir(parents=True, exist_ok=True)
        with folder_beside(target, target.parent) as folder:
            made = folder / target.name
            compile_library(compiler, made, extra=extra, machine=machine)
            record = make_manifest(folder, [target.name])[target.name]
            made.replace(target)
            write_whole(target.with_name(_RECORD), json.dumps({target.name: asdict(record)}))
    except CompilerError as error:
        raise ProviderUnavailableError(str(error)) from error
    except OSError as error:
        raise unusable(error) from error
    return target
