"""Find the shared libraries that a provider needs, and say how to install missing ones."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...records import dataclass

# Python packages that contain NVIDIA's libraries.
_PACKAGES = ("nvidia", "tensorrt_libs", "tensorrt_rtx_libs")


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library.

    Args:
        what: its product name and version.
        linux: file name on Linux.
        windows: file name on Windows.
        remedy: how to install it.
    """

    what: str
    linux: str
    windows: str
    remedy: str

    @property
    def file(self) -> str:
        """The file name on this system."""
        return self.windows if sys.platform == "win32" else self.linux


def missing(libraries: Iterable[Library]) -> list[Library]:
    """Return the libraries that cannot be loaded; the others are loaded, so that dependants find them."""
    return [library for library in libraries if load(library.file) is None]


def complaint(lacking: Sequence[Library]) -> str | None:
    """Return a message about missing libraries with their remedies, None if none is missing."""
    if not lacking:
        return None
    names = ", ".join(f"{library.file} ({library.what})" for library in lacking)
    remedies = "; ".join(dict.fromkeys(library.remedy for library in lacking))
    return f"cannot load {names}. {remedies}"


@functools.cache
def load(file: str) -> ctypes.CDLL | None:
    """Load a library from the system's search path or from a Python package; None if it cannot be loaded."""
    for candidate in (file, *_in_packages(file)):
        try:
            return ctypes.CDLL(str(candidate), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    return None


def _in_packages(file: str) -> list[Path]:
    paths: list[Path] = []
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec is not None else []:
            paths += sorted(Path(folder).rglob(file))
    return paths
