"""Shared libraries that a provider loads: which are there, and what to install for those that are not."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Packages of Python that bring NVIDIA's libraries, beside those of the system.
_PACKAGES = ("nvidia", "tensorrt_libs", "tensorrt_rtx_libs")


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library by its file names.

    Args:
        what: what it is, with the version wanted.
        linux: file name there.
        windows: file name there.
        remedy: how to get it.
    """

    what: str
    linux: str
    windows: str
    remedy: str

    @property
    def file(self) -> str:
        """Its file name on this system."""
        return self.windows if sys.platform == "win32" else self.linux


def missing(libraries: Iterable[Library]) -> list[Library]:
    """Those that cannot be loaded. The others are loaded now, so that who needs them finds them."""
    return [library for library in libraries if load(library.file) is None]


def complaint(lacking: Sequence[Library]) -> str | None:
    """One sentence about the libraries that are missing, or None."""
    if not lacking:
        return None
    names = ", ".join(f"{library.file} ({library.what})" for library in lacking)
    remedies = "; ".join(dict.fromkeys(library.remedy for library in lacking))
    return f"cannot load {names}. {remedies}"


@functools.cache
def load(file: str) -> ctypes.CDLL | None:
    """Load a library from the system's search path, or from a Python package that brings it."""
    for candidate in (file, *_in_packages(file)):
        try:
            return ctypes.CDLL(str(candidate), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    return None


def _in_packages(file: str) -> list[Path]:
    found: list[Path] = []
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec is not None else []:
            found += sorted(Path(folder).rglob(file))
    return found
