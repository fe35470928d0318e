"""The files of the wheel. A missing file causes no error in a build, so the list is checked here."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

from carryall.providers.native.compiler import find_compiler, installed_library

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cli", "client", "exporter", "graph_opt", "proto", "providers", "runtime", "storage")
FILES = (
    "__init__.py",
    "__main__.py",
    "contract.py",
    "deferred_imports.py",
    "errors.py",
    "logs.py",
    "options.py",
    "plain_json.py",
    "program.py",
    "records.py",
    "reports.py",
    "progress.py",
    "py.typed",
)


@pytest.fixture(
    scope="module",
    params=[pytest.param("0", id="plain"), pytest.param("1", marks=pytest.mark.slow, id="with kernels")],
)
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build a wheel from an sdist of this checkout; compiling the kernels takes two minutes."""
    if request.param == "1" and find_compiler() is None:
        pytest.skip("needs a compiler")
    out = tmp_path_factory.mktemp("dist")
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--skip-dependency-check",
        "--outdir",
        str(out),
        str(ROOT),
    ]
    # setuptools collects the sdist's files in a folder of the checkout, which two workers would share.
    with FileLock(tmp_path_factory.getbasetemp().parent / "carryall-build.lock"):
        environment = os.environ | {"CARRYALL_BUILD_KERNELS": request.param}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert len(list(out.glob("*.tar.gz"))) == 1
    (path,) = out.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl") == (request.param == "0")
    return zipfile.ZipFile(path)


SUFFIXES = {".py", ".pyi", ".proto", ".html", ".toml", ".cpp", ".h", ".cu", ".cuh"}


def source_files() -> set[str]:
    """Return the names in the wheel of all files of the package."""
    found = {f"carryall/{name}" for name in FILES}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            is_demo = "exporter/demo/" in path.as_posix()
            if (
                path.is_file()
                and "__pycache__" not in path.parts
                and (
                    is_demo
                    or path.suffix in {".py", ".pyi", ".proto", ".html", ".toml", ".cpp", ".h", ".cu", ".cuh"}
                )
            ):
                found.add(f"carryall/{path.relative_to(ROOT).as_posix()}")
    return found


def kernels() -> str:
    """Return the name in the wheel of the library of CPU kernels."""
    return f"carryall/{installed_library().relative_to(ROOT).as_posix()}"


@pytest.mark.long
def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    plain = str(wheel.filename).endswith("-py3-none-any.whl")
    assert names == source_files() | (set() if plain else {kernels()})


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "built"), [("", True), ("1", False)])
def test_a_wheel_with_a_compiler_that_fails(tmp_path: Path, setting: str, built: bool) -> None:
    """A compiler that fails makes a wheel without kernels, or none if they are required."""
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--skip-dependency-check",
        "--outdir",
        str(tmp_path),
        str(ROOT),
    ]
    environment = os.environ | {"CARRYALL_BUILD_KERNELS": setting, "CXX": "false"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    wheels = list(tmp_path.glob("*.whl"))
    if not built:
        assert done.returncode != 0
        assert wheels == []
        assert "the compiler false failed on" in done.stdout + done.stderr
        return
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (path,) = wheels
    assert kernels() not in zipfile.ZipFile(path).namelist()
    assert "installed without its CPU kernels" in done.stdout + done.stderr


@pytest.mark.long
def test_the_wheel_holds_what_the_readme_promises(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {f"carryall/{folder}/__init__.py" for folder in FOLDERS} <= names
    assert "carryall/py.typed" in names
    assert {
        f"carryall/exporter/demo/pycoder/{file}"
        for file in ("config.json", "model.safetensors", "tokenizer.json")
    } <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "carryall = carryall.cli:main" in wheel.read(entry_points).decode()


@pytest.mark.long
def test_the_wheel_is_small_enough_to_publish(wheel: zipfile.ZipFile) -> None:
    assert sum(info.compress_size for info in wheel.infolist()) < 40_000_000


@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
def test_the_import_view_is_made_of_links(name: str) -> None:
    link = ROOT / "src" / "carryall" / name
    advice = "git made a text file of a symbolic link; see 'Windows' in CONTRIBUTING.md"
    assert link.is_symlink(), advice
    assert link.resolve() == ROOT / name, advice


def test_build_leftovers_stay_out_of_git() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    banned = (".egg-info", "__pycache__", ".venv", "build/", "dist/")
    assert [path for path in done.stdout.splitlines() if any(part in path for part in banned)] == []
