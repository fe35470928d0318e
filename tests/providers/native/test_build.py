"""Building and finding the library of kernels."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from carryall.errors import ProviderUnavailableError
from carryall.providers.native import build, compiler
from carryall.providers.native.library import find_library, kernel_library


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty cache, and an installation without kernels."""
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("carryall.providers.native.library.installed_library", lambda: tmp_path / "none")


def test_without_a_library_the_error_says_how_to_build_it() -> None:
    assert find_library() is None
    with pytest.raises(
        ProviderUnavailableError, match="not built; build them with `carryall doctor --build-kernels`"
    ):
        kernel_library()


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert compiler.find_compiler() is None
    with pytest.raises(ProviderUnavailableError, match=r"install a C\+\+17 compiler .*carryall\[native\]"):
        build.build_library()


def test_compilers_are_tried_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "ccache my-c++")
    assert compiler.find_compiler() == ["ccache", "my-c++"]
    monkeypatch.delenv("CXX")
    monkeypatch.setattr("shutil.which", lambda name: "/bin/g++" if name == "g++" else None)
    assert compiler.find_compiler() == ["/bin/g++"]
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert compiler.find_compiler() == [sys.executable, "-m", "ziglang", "c++"]


def test_ziglang_takes_an_arm_architecture_as_a_processor() -> None:
    flags = compiler.flags_of_sources("aarch64")["i8mm"]
    assert compiler.flags_for(["g++"], flags) == ["-march=armv8.2-a+dotprod+i8mm"]
    zig = [sys.executable, "-m", "ziglang", "c++"]
    assert compiler.flags_for(zig, flags) == ["-mcpu=generic+dotprod+i8mm"]


def test_a_command_that_cannot_be_split_is_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", 'c++ "-O2')
    with pytest.raises(ProviderUnavailableError, match="the compiler 'c\\+\\+ \"-O2' cannot be started"):
        build.build_library()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "#!/bin/sh\necho 'x.cpp:1: error: no <cmath>' >&2\nexit 1",
            "failed on its version: x.cpp:1: error: no",
        ),
        ("#!/bin/sh\nexit 3", "failed on its version: exit code 3"),
        ("#!/bin/sh\nexit 0", "made no file"),
        (None, "cannot be started: No such file"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_a_compiler_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, message: str
) -> None:
    compiler = tmp_path / "broken-c++"
    if script is not None:
        compiler.write_text(script)
        compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(ProviderUnavailableError, match=message):
        build.build_library()
    assert build.built_library() is None


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_a_compiler_that_fails_late_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken-c++"
    compiler.write_text('#!/bin/sh\ncase "$1" in --version) exit 0;; esac\nexit 1')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(ProviderUnavailableError, match=r"failed on \w+\.cpp: exit code 1"):
        build.build_library()
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in place of a library that was built."""

    def compile_nothing(command: object, made: Path, **options: object) -> None:
        made.write_bytes(b"a library")

    monkeypatch.setattr(build, "required_compiler", lambda: ["c++"])
    monkeypatch.setattr(build, "output_of", lambda command, what: "1.0")
    monkeypatch.setattr(build, "compile_library", compile_nothing)
    return build.build_library()


def swap(path: Path, content: bytes) -> None:
    """Change a file, but not its size and its time of modification."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "changed": (lambda path: swap(path, b"A library"), "differs from the recorded sha256"),
    "cut": (lambda path: path.write_bytes(b"a lib"), "has 5 bytes instead of 9"),
    "a folder": (
        lambda path: path.rename(f"{path}.old").with_name(path.name).mkdir(),
        "is not a regular file",
    ),
    "no record": (lambda path: path.with_name("library.json").unlink(), "library.json cannot be read"),
    "no JSON": (lambda path: path.with_name("library.json").write_text("{"), "library.json cannot be read"),
    "another record": (lambda path: path.with_name("library.json").write_text("{}"), "is not of"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_not_loaded_and_built_again(damage: str, built: Path) -> None:
    change, words = DAMAGES[damage]
    assert build.built_library() == built
    change(built)
    with pytest.raises(ProviderUnavailableError, match=f"are damaged: .*{words}.*; build them again with"):
        build.built_library()
    if built.is_dir():
        built.rmdir()
    assert build.build_library() == built
    assert build.built_library() == built


def test_a_library_of_other_sources_is_not_found(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.built_library() == built
    monkeypatch.setattr(build, "sources_key", lambda: "0" * 16)
    assert build.built_library() is None


def test_a_file_that_is_no_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / compiler.library_name()
    path.write_text("no library")
    monkeypatch.setattr("carryall.providers.native.library.built_library", lambda: path)
    with pytest.raises(ProviderUnavailableError, match="cannot be loaded"):
        kernel_library()


def test_another_layout_is_refused(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carryall.providers.native.library.installed_library", lambda: library)
    assert kernel_library().path == library
    monkeypatch.setattr("carryall.providers.native.library.LAYOUT", 9)
    with pytest.raises(ProviderUnavailableError, match="layout version 2, not 9"):
        kernel_library()


@pytest.mark.parametrize(
    ("machine", "source"),
    [("x86_64", "avx512vnni"), ("AMD64", "avx2"), ("arm64", "i8mm"), ("riscv64", "portable")],
)
def test_sources_of_each_machine_exist(machine: str, source: str) -> None:
    sources = compiler.flags_of_sources(machine)
    assert source in sources
    assert all((compiler.SOURCES / f"{name}.cpp").is_file() for name in sources)
