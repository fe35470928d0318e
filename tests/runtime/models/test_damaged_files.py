"""Damage to every file of a package and of a cache entry gives an error or the right answer.

A damaged package is an error that names the file. A damaged cache entry is rebuilt: the damage costs time
and never changes an answer.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_models import write_tiny

from carryall import LLM, SamplingParams
from carryall.cli import carryall
from carryall.errors import PackageError
from carryall.exporter.export import export_package
from carryall.exporter.package import Package
from carryall.providers import get_provider
from carryall.providers.base import RunnerConfig
from carryall.runtime.models.lowering import lowered_model, with_context
from carryall.runtime.models.model_source import resolve_model
from carryall.storage import hashes
from carryall.storage.cache import cached_folder

PROMPT = "def f(x):"
FILES = (
    "carryall.json",
    "config.json",
    "generation_config.json",
    "model.onnx",
    "model.onnx.data",
    "tokenizer.json",
    "tokenizer_config.json",
)
ENTRY_FILES = ("entry.json", "model.onnx", "model.onnx.data", "weights.data")


def truncate(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path, other: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path, other: Path) -> None:
    """Change one byte in place; size, inode and modification time stay."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        byte = file.read(1)[0]
        file.seek(before.st_size // 2)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def zero(path: Path, other: Path) -> None:
    """Replace the content by zeros, as a crash of the machine may leave them."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(bytes(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path, other: Path) -> None:
    """Copy another model's file over it, with the same modification time."""
    before = path.stat()
    shutil.copyfile(other, path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def swap(path: Path, other: Path) -> None:
    """Rename another model's file over it, as an unfinished copy of a folder does."""
    copy = shutil.copy(other, path.with_name("copy"))
    os.replace(copy, path)


def extend(path: Path, other: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def delete(path: Path, other: Path) -> None:
    path.unlink()


def folder(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path, other: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def dangling_link(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def unreadable(path: Path, other: Path) -> None:
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")


Damage = Callable[[Path, Path], None]
WAYS: tuple[Damage, ...] = (
    *(truncate, empty, flip, zero, replace, swap, extend, delete, folder, pipe, dangling_link, unreadable),
)


@dataclass(frozen=True)
class Case:
    package: Path
    other: Path  # of the same shapes and other weights
    files: Path  # files of another package, which all differ
    cache: Path
    answer: list[int]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Build two packages and a cache with both lowered, which every test copies."""
    root = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARRYALL_CACHE", str(root / "cache"))
        source = write_tiny("llama", root / "source")
        package = export_package(source, root / "package").path
        source = write_tiny("llama", root / "source 2", seed=1, rms_norm_eps=1e-6)
        other = export_package(source, root / "other").path
        first, second = generate(package), generate(other)
    files = shutil.copytree(other, root / "files")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        flip(files / name, files)  # equal in both until here
    assert first != second, "else nobody could tell the models apart"
    return Case(package, other, files, root / "cache", first)


@pytest.fixture
def case(made: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Return a copy whose files were verified and recorded."""
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    shutil.copytree(made.cache, tmp_path / "cache")
    shutil.copytree(made.package, tmp_path / "package")
    found = Case(tmp_path / "package", made.other, made.files, tmp_path / "cache", made.answer)
    Package.open(found.package)
    return found


def generate(package: Path) -> list[int]:
    with LLM(str(package), max_slots=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        return list(llm.generate([PROMPT], params)[0].outputs[0].token_ids)


def remembered(entry: Path) -> None:
    """Let the cache verify the entry before its files are damaged."""

    def fail(folder: Path) -> None:
        raise AssertionError(f"{entry} should be whole")

    assert cached_folder(entry.parent.name, entry.name, fail) == entry


def lowered(case: Case, package: Path) -> Path:
    """Return the cache folder of a package's lowered graph."""
    files = resolve_model(package)
    provider = get_provider("cpu")
    config = provider.resolve_options(RunnerConfig(max_slots=1))
    config = with_context(config, files)
    return lowered_model(files, provider, config).parent


@pytest.mark.long
@pytest.mark.parametrize("damage", WAYS)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_package_is_an_error_that_names_the_file(
    name: str, damage: Damage, case: Case, tmp_path: Path
) -> None:
    damage(case.package / name, case.files / name)
    words = f"{name} .*; export the model again"
    if (name, damage) == ("carryall.json", delete):  # without its record, it is a folder with an ONNX file
        assert generate(case.package) == case.answer
        return
    if name == "carryall.json" and damage in (replace, swap):  # it is whole, and tells of other files
        name, words = "config.json", "config.json is damaged: it differs from the recorded sha256"
    with pytest.raises(PackageError, match=words) as caught:
        LLM(str(case.package))
    message = str(caught.value)
    assert "\n" not in message
    (tmp_path / "text").write_text(PROMPT * 20)
    for verb in (["run", case.package, PROMPT], ["eval", case.package, "--text", tmp_path / "text"]):
        result = CliRunner().invoke(carryall, [str(word) for word in verb])
        assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"error: {message}\n")
    checked = CliRunner().invoke(carryall, ["verify", str(case.package), "--integrity"])
    assert checked.exit_code == 1
    assert name in checked.stderr


def test_a_file_that_was_added_is_an_error(case: Case) -> None:
    (case.package / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(PackageError, match=r"chat_template\.jinja is damaged: it was added after the export"):
        LLM(str(case.package))
    (case.package / "chat_template.jinja").unlink()
    (case.package / "README.md").write_text("what nothing reads may be added")
    assert generate(case.package) == case.answer


@pytest.mark.long
@pytest.mark.parametrize("damage", WAYS)
@pytest.mark.parametrize("name", ENTRY_FILES)
def test_a_damaged_cache_entry_changes_no_answer(
    name: str, damage: Damage, case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    entry, other = lowered(case, case.package), lowered(case, case.other)
    assert entry.is_relative_to(case.cache)
    remembered(entry)
    damage(entry / name, other / name)
    assert generate(case.package) == case.answer
    assert f"cache entry {entry} is damaged and is built again: " in caplog.text
    remembered(entry)


def test_an_entry_in_the_place_of_another_changes_no_answer(case: Case) -> None:
    entry, other = lowered(case, case.package), lowered(case, case.other)
    shutil.rmtree(entry)
    shutil.copytree(other, entry)
    assert generate(case.package) == case.answer
    shutil.rmtree(entry)
    entry.write_text("a file")
    assert generate(case.package) == case.answer


def test_a_damaged_package_leaves_the_cache_of_the_intact_one_alone(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "fresh"))
    bad = shutil.copytree(case.package, tmp_path / "bad")
    zero(bad / "model.onnx.data", bad)
    with pytest.raises(PackageError):
        LLM(str(bad))
    assert not (tmp_path / "fresh" / "lowered").exists()
    assert generate(case.package) == case.answer


def test_an_onnx_file_answers_with_the_weights_beside_it(case: Case) -> None:
    """No record describes these weights, so the present files are the model, in the cache too."""
    other = generate(case.other / "model.onnx")
    assert generate(case.package / "model.onnx") == case.answer
    for name in ("model.onnx", "model.onnx.data"):
        shutil.copy(case.package / name, case.package / f"kept {name}")
        replace(case.package / name, case.other / name)
    assert generate(case.package / "model.onnx") == other
    for name in ("model.onnx", "model.onnx.data"):
        os.replace(case.package / f"kept {name}", case.package / name)
    assert generate(case.package / "model.onnx") == case.answer


def test_a_model_that_changes_while_it_is_lowered_is_not_kept(case: Case, tmp_path: Path) -> None:
    files, provider = resolve_model(case.package), get_provider("cpu")
    config = with_context(RunnerConfig(max_slots=1, context_length=77), files)

    told: list[str] = []

    def tell(done: int, total: int, name: str) -> None:
        told.append(name)
        if len(told) == 1:
            flip(case.package / "model.onnx.data", case.package)

    before = set((case.cache / "lowered").iterdir())
    with pytest.raises(PackageError, match="changed while they were read; try again"):
        lowered_model(files, provider, config, tell)
    assert set((case.cache / "lowered").iterdir()) == before


def test_integrity_lists_every_file(case: Case) -> None:
    flip(case.package / "tokenizer.json", case.package)
    (case.package / "model.onnx").unlink()
    result = CliRunner().invoke(carryall, ["verify", str(case.package), "--integrity", "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["passed"] is False
    assert {file["name"] for file in found["files"]} == set(FILES) - {"carryall.json"}
    assert {file["name"]: file["problem"] for file in found["files"] if file["problem"]} == {
        "model.onnx": "is missing",
        "tokenizer.json": "differs from the recorded sha256",
    }


def test_integrity_of_a_whole_package_and_of_what_is_none(case: Case, tmp_path: Path) -> None:
    result = CliRunner().invoke(carryall, ["verify", str(case.package), "--integrity"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("  ok, ") == len(FILES) - 1
    for words, arguments in (
        ("is not a package", ["demo", "--integrity"]),
        ("omit B", ["demo", "demo", "--integrity"]),
        ("missing argument 'B'", ["demo"]),
    ):
        result = CliRunner().invoke(carryall, ["verify", *arguments])
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert words in result.stderr


def test_integrity_reads_what_is_remembered_as_whole(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the disk changes content but no times."""
    path = case.package / "model.onnx.data"
    stamp = hashes._stamp(path.stat())
    flip(path, path)
    monkeypatch.setattr(
        hashes,
        "_stamp",
        lambda stat: stamp if stat.st_ino == stamp[-1] else (stat.st_size, 0, 0, stat.st_ino),
    )
    Package.open(case.package)  # cannot see it
    result = CliRunner().invoke(carryall, ["verify", str(case.package), "--integrity"])
    assert (result.exit_code, "model.onnx.data" in result.stderr) == (1, True)
