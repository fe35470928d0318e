"""The library of kernels, built once for all workers; skipped without a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock

from carryall.providers.native.build import build_library, built_library, find_compiler


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the library in a cache of the workers' common folder."""
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    shared = tmp_path_factory.getbasetemp().parent / "carryall-kernels"
    with pytest.MonkeyPatch.context() as patch, FileLock(f"{shared}.lock"):
        patch.setenv("CARRYALL_CACHE", str(shared))
        return built_library() or build_library()


@pytest.fixture
def kernels_of_this_machine(library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let providers find the library."""
    monkeypatch.setattr("carryall.providers.native.library.built_library", lambda: library)
    return library
