"""``carryall cache``: lists the entries, and deletes entries only."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tiny_models import write_tiny

from carryall.cli import carryall
from carryall.runtime.models.loading import load_model
from carryall.storage.cache import cached_folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*args: object, typed: str = "") -> Result:
    return CliRunner().invoke(carryall, ["cache", *map(str, args)], input=typed)


def fill(kind: str, key: str, size: int, hours: float) -> Path:
    def build(folder: Path) -> None:
        (folder / "a").write_bytes(bytes(size))

    folder = cached_folder(kind, key, build, {"model": f"model-{key}"})
    used = time.time() - hours * 3600
    os.utime(folder / "entry.json", (used, used))
    return folder


@pytest.fixture
def three() -> list[Path]:
    return [
        fill("lowered", "old", 10_000, 100),
        fill("packages", "mid", 20_000, 10),
        fill("lowered", "new", 30_000, 0),
    ]


def test_an_empty_cache_is_reported_as_empty(own_cache: Path) -> None:
    result = run("list")
    assert (result.exit_code, result.stdout) == (0, f"{own_cache}: 0 entries, 0 B\n")
    assert run("clear").exit_code == 0
    assert run("prune").stdout == "deleted 0 entries, 0 B; 0 B left\n"


@pytest.mark.parametrize("verb", [["prune"], ["clear", "--yes"]])
def test_what_killed_processes_left_is_deleted(
    verb: list[str], own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def leave(parent: Path, name: str) -> None:
        (parent / name).mkdir(parents=True)
        (parent / name / "weights").write_bytes(bytes(1500))
        (parent / f"{name}.lock").touch()

    for _ in range(2):
        leave(tmp_path, "carryall.01234567")
        leave(own_cache / "lowered", ".carryall.01234567")
        shown = run(*verb).stdout.splitlines()
        assert shown[1:] == ["deleted temporary files of ended processes, 3.0 kB"]
    leave(tmp_path, "carryall.01234567")
    assert json.loads(run(*verb, "--json").stdout)["freed_temporary_bytes"] == 1500
    assert list(tmp_path.iterdir()) == [own_cache]
    assert list((own_cache / "lowered").iterdir()) == []


def test_entries_are_listed_with_size_age_and_origin(three: list[Path], own_cache: Path) -> None:
    found = json.loads(run("list", "--json").stdout)
    assert found["folder"] == str(own_cache)
    assert found["bytes"] == sum(file.stat().st_size for file in own_cache.glob("*/[!.]*/*"))
    assert [(entry["kind"], entry["about"]["model"]) for entry in found["entries"]] == [
        ("lowered", "model-new"),
        ("packages", "model-mid"),
        ("lowered", "model-old"),
    ]
    assert [round(entry["idle_seconds"] / 3600) for entry in found["entries"]] == [0, 10, 100]
    text = run("list").stdout
    for words in ("model-new", "model-mid", "10 h ago", "4 d ago", "3 entries"):
        assert words in text


def test_forms_of_one_model_are_told_apart(tmp_path: Path) -> None:
    checkpoint = write_tiny("llama", tmp_path / "tiny")
    for method in (None, "int8-fast"):
        load_model(checkpoint, quantize=method, context_length=64).close()
    entries = json.loads(run("list", "--json").stdout)["entries"]
    about = [entry["about"] for entry in entries if entry["kind"] == "lowered"]
    assert {each["quantization"] for each in about} == {None, "int8-fast"}
    text = " ".join(run("list").stdout.split())
    assert "context_length 64, quantization int8-fast" in text


def test_engines_of_other_libraries_are_listed_too(own_cache: Path) -> None:
    for name in ("tensorrt/engines/abc/engines.json", "tensorrt/engines/def/x.engine", "openvino/1.blob"):
        (own_cache / name).parent.mkdir(parents=True, exist_ok=True)
        (own_cache / name).write_bytes(bytes(7))
    entries = json.loads(run("list", "--json").stdout)["entries"]
    assert sorted(Path(entry["path"]).name for entry in entries) == ["1.blob", "abc", "def"]
    assert {entry["bytes"] for entry in entries} == {7}


@pytest.mark.parametrize(("typed", "code", "left"), [("n\n", 130, 3), ("", 130, 3), ("y\n", 0, 0)])
def test_clear_asks(typed: str, code: int, left: int, three: list[Path]) -> None:
    assert run("clear", typed=typed).exit_code == code
    assert sum(path.exists() for path in three) == left


def test_clear_deletes_entries_and_nothing_else(three: list[Path], own_cache: Path) -> None:
    (own_cache / "notes.txt").write_text("mine")
    (own_cache / "photos").mkdir()
    found = json.loads(run("clear", "--yes", "--json").stdout)
    assert (len(found["removed"]), found["left_bytes"]) == (3, 0)
    assert found["freed_bytes"] > 60_000
    assert (own_cache / "notes.txt").read_text() == "mine"
    assert (own_cache / "photos").is_dir()
    assert list((own_cache / "hashes").iterdir()) == [], "records of folders that are gone"


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--max-size", "1TB"], ["old", "mid", "new"]),
        (["--max-size", "55kB"], ["mid", "new"]),
        (["--max-size", "35kB"], ["new"]),
        (["--max-size", "0"], ["new"]),  # used within the last hour
        (["--older-than", "50h"], ["mid", "new"]),
        (["--older-than", "0s"], ["new"]),
        (["--older-than", "50h", "--max-size", "35 kB"], ["new"]),
        ([], ["old", "mid", "new"]),
    ],
)
def test_prune_keeps_what_was_used_last(options: list[str], kept: list[str], three: list[Path]) -> None:
    assert run("prune", *options).exit_code == 0
    assert [path.name for path in three if path.exists()] == kept


def test_prune_goes_down_to_the_limit_of_the_environment(
    three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE_GB", "0.00006")
    assert run("prune").stdout.startswith("deleted 1 entry, ")
    assert [path.name for path in three if path.exists()] == ["mid", "new"]


@pytest.mark.parametrize("option", ["--max-size", "--older-than"])
@pytest.mark.parametrize("value", ["", "-1", "many", "1x", "nan", "1e9", "9" * 400])
def test_amounts_that_are_none_are_one_line(option: str, value: str) -> None:
    result = run("prune", option, value)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "give a number and one of" in result.stderr


@pytest.mark.parametrize(
    "verb", ["cache list", "cache clear --yes", "cache prune", "run demo x --max-tokens 1", "eval demo"]
)
def test_a_file_in_place_of_the_cache_is_named_with_its_variable(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "file"))
    result = CliRunner().invoke(carryall, verb.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: CARRYALL_CACHE={tmp_path / 'file'} cannot be used: Not a directory; set CARRYALL_CACHE to a "
        "folder you can write to\n"
    )
