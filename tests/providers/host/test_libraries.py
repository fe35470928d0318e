"""Detection of libraries, and the messages about missing ones."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carryall.errors import ProviderUnavailableError
from carryall.providers.host import libraries, nvidia
from carryall.providers.host.libraries import Library
from carryall.providers.ort import ort

HERE = Library("the C library", "libc.so.6", "kernel32.dll", "Install a system")
GONE = Library("Nothing 7", "libnothing.so.7", "nothing_7.dll", "Install it with: pip install nothing")
AWAY = Library("Nowhere 1", "libnowhere.so.1", "nowhere_1.dll", "Install it with: pip install nothing")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    libraries.load.cache_clear()
    yield
    libraries.load.cache_clear()


def test_a_missing_library_is_named_once_with_version_and_remedy() -> None:
    assert libraries.missing([HERE]) == []
    lacking = libraries.missing([HERE, GONE, AWAY])
    assert lacking == [GONE, AWAY]
    assert libraries.complaint([]) is None
    assert libraries.complaint(lacking) == (
        f"cannot load {GONE.file} (Nothing 7), {AWAY.file} (Nowhere 1). Install it with: pip install nothing"
    )


def test_libraries_of_python_packages_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NVIDIA's wheels put their libraries into site-packages/nvidia/cu13/lib."""
    (tmp_path / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    (tmp_path / "nvidia" / "cu13" / "lib" / GONE.file).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    tried: list[str] = []

    def open_library(name: str, mode: int) -> str:
        tried.append(name)
        if not name.startswith(str(tmp_path)):
            raise OSError("cannot open shared object file")
        return "loaded"

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    assert libraries.missing([GONE]) == []
    assert tried == [GONE.file, str(tmp_path / "nvidia" / "cu13" / "lib" / GONE.file)]


class FakeRuntime:
    """The used calls of the CUDA runtime, on a machine with one device."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.device = code, -1
        self.cudaGetErrorString = lambda code: b"driver version is insufficient"
        self.cudaGetLastError = lambda: self.code

    def cudaGetDeviceCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 1
        return self.code

    def cudaSetDevice(self, index: int) -> int:  # noqa: N802
        self.device = index
        return self.code if index == 0 else 101

    def cudaMemGetInfo(self, free: Any, total: Any) -> int:  # noqa: N802
        free._obj.value, total._obj.value = 3, 4
        return self.code


def test_the_runtime_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRuntime()
    monkeypatch.setattr(libraries, "load", lambda file: fake)
    assert nvidia.device_count() == 1
    assert nvidia.memory(0) == (3, 4)
    with pytest.raises(ProviderUnavailableError, match=r"cudaSetDevice\(5\) failed: driver version"):
        nvidia.memory(5)


def test_a_driver_that_is_too_old_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "load", lambda file: FakeRuntime(35))
    with pytest.raises(ProviderUnavailableError, match="driver version is insufficient"):
        nvidia.device_count()


def test_without_a_runtime_nothing_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "load", lambda file: None)
    with pytest.raises(ProviderUnavailableError, match=r"cudart.* cannot be loaded. .*'carryall\[cuda\]'"):
        nvidia.memory(0)


@pytest.mark.parametrize(("built_for", "runtime"), [("12.8", "libcudart.so.12"), ("13.0", "libcudart.so.13")])
def test_the_wheel_decides_the_version_of_cuda(
    monkeypatch: pytest.MonkeyPatch, built_for: str, runtime: str
) -> None:
    class Wheel:
        cuda_version = built_for

    monkeypatch.setattr(ort, "load_onnxruntime", lambda what, extra: Wheel)
    assert runtime in {library.linux for library in nvidia.cuda_libraries()}
