"""Packages of format 1, whose record has the SHA-256 of two files, still load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_models import write_tiny

from carryall import LLM, SamplingParams
from carryall.cli import carryall
from carryall.errors import PackageError
from carryall.exporter.export import export_package
from carryall.exporter.package import Package
from carryall.runtime.models.model_source import resolve_model

LISTED = ("model.onnx", "model.onnx.data")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def new(tmp_path: Path) -> Path:
    checkpoint = write_tiny("llama", tmp_path / "checkpoint", hidden_size=128, intermediate_size=128)
    return export_package(checkpoint, tmp_path / "package").path


@pytest.fixture
def old(new: Path) -> Path:
    """Return the package with a record of format 1."""
    record = json.loads((new / "carryall.json").read_text())
    del record["record_sha256"]
    record["format_version"] = 1
    record["files"] = {name: record["files"][name]["sha256"] for name in LISTED}
    (new / "carryall.json").write_text(json.dumps(record, indent=2) + "\n")
    return new


def generate(package: Path) -> list[int]:
    with LLM(package, max_slots=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        return list(llm.generate(["def f(x):"], params)[0].outputs[0].token_ids)


def test_it_answers_as_in_the_new_format(new: Path, request: pytest.FixtureRequest) -> None:
    expected, key = generate(new), resolve_model(new).content_key
    package = request.getfixturevalue("old")
    assert Package.open(package).record.format_version == 1
    assert generate(package) == expected
    assert resolve_model(package).content_key == key


@pytest.mark.long
def test_it_is_written_anew_in_the_new_format(old: Path) -> None:
    quantized = Package.open(resolve_model(old, quantize="int4-fast").folder)
    assert quantized.record.format_version == 2
    assert set(quantized.record.files) >= {*LISTED, "config.json", "tokenizer.json"}


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("remembered", [False, True])
def test_a_listed_file_that_is_damaged_is_refused(name: str, remembered: bool, old: Path) -> None:
    if remembered:
        Package.open(old)
    with (old / name).open("r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(PackageError, match=f"{name} is damaged: it differs from the recorded sha256"):
        LLM(old)
    checked = CliRunner().invoke(carryall, ["verify", str(old), "--integrity"])
    assert (checked.exit_code, f"1 of 2 files differ from the record ({name})" in checked.stderr) == (1, True)


@pytest.mark.parametrize("name", [*LISTED, "config.json", "tokenizer.json"])
def test_a_file_that_every_package_has_is_named_when_it_is_missing(name: str, old: Path) -> None:
    (old / name).unlink()
    with pytest.raises(PackageError, match=f"is not a complete package: {name} is missing"):
        Package.open(old)


def test_unlisted_files_are_not_checked_but_change_the_identity(old: Path) -> None:
    before, answer = Package.open(old).content_hash, generate(old)
    (old / "chat_template.jinja").write_text("{{ messages }}")
    with (old / "generation_config.json").open("a") as file:
        file.write("\n")
    assert Package.open(old).content_hash != before
    assert generate(old) == answer
    checked = CliRunner().invoke(carryall, ["verify", str(old), "--integrity"])
    assert (checked.exit_code, checked.stdout.count("  ok, "), checked.stderr) == (0, len(LISTED), "")
