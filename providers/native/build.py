"""The libraries of CPU kernels in the cache, in folders named by a hash of sources, flags and compiler."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from ...errors import ProviderUnavailableError
from ...storage.root import cache_root, unusable
from ...storage.scratch import folder_beside
from .compiler import CompilerError, compile_library, library_name, output_of, required_compiler, sources_key


def built_library() -> Path | None:
    """Return the newest library of the cache that was built from these sources, None if there is none."""
    found = list((cache_root() / "kernels").glob(f"{sources_key()}-*/{library_name()}"))
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


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
            made.replace(target)
    except CompilerError as error:
        raise ProviderUnavailableError(str(error)) from error
    except OSError as error:
        raise unusable(error) from error
    return target
