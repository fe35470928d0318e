from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from tiny_models import write_tiny

from carryall.errors import CheckpointError, OutputExistsError, PackageError
from carryall.exporter.export import export_package
from carryall.exporter.package import COPIED_FILES, Package, fingerprint
from carryall.exporter.package_writing import check_paths, new_folder, write_package
from carryall.storage.manifest import make_manifest


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write_tiny("llama", tmp_path / "checkpoint", eos_token_id=[1, 2])
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("not part of a package")
    return folder


@pytest.fixture
def package(source: Path, tmp_path: Path) -> Package:
    return export_package(source, tmp_path / "package")


def edit_record(package: Package, **changes: Any) -> None:
    path = package.path / "carryall.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_package_reads_back_as_it_was_written(package: Package) -> None:
    again = Package.open(package.path)
    assert again.record == package.record
    assert again.content_hash == package.content_hash
    assert again.signature.num_layers == 2
    assert set(again.integrity().values()) == {""}


def test_the_files_of_the_checkpoint_are_copied_verbatim(package: Package, source: Path) -> None:
    copied = {path.name for path in source.iterdir()} & set(COPIED_FILES)
    assert {path.name for path in package.path.iterdir()} == copied | {
        "carryall.json",
        "model.onnx",
        "model.onnx.data",
    }
    for name in copied:
        assert (package.path / name).read_bytes() == (source / name).read_bytes()
    assert package.json("generation_config.json")["eos_token_id"] == 257
    assert package.json("special_tokens_map.json") == {}


def test_the_record_has_facts_that_the_graph_lacks(package: Package, source: Path) -> None:
    record = package.record
    assert (record.model_type, record.context_length, record.bos_token_id) == ("llama", 128, 256)
    assert record.eos_token_ids == (257,), "generation_config.json wins over config.json"
    assert (record.quantization, record.passes) == (None, ())
    assert record.source == fingerprint(source)
    assert set(record.versions) == {"carryall", "onnx-ir"}


def test_progress_ends_at_the_total(source: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    export_package(
        source, tmp_path / "package", progress=lambda done, total, name: calls.append((done, total, name))
    )
    totals = {total for _, total, _ in calls}
    assert len(totals) == 1
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert calls[-1][0] == totals.pop()
    assert "model.layers.0.mlp.up_proj.weight" in {name for _, _, name in calls}


def test_an_empty_output_folder_is_accepted(source: Path, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    assert Package.is_package(export_package(source, tmp_path / "package").path)


def test_a_package_can_be_rewritten_into_another(package: Package, tmp_path: Path) -> None:
    copy = write_package(package.load(), package.path, tmp_path / "copy", passes=("nothing",))
    assert copy.record.passes == ("nothing",)
    assert copy.record.files["model.onnx.data"] == package.record.files["model.onnx.data"]


def test_the_content_hash_follows_the_weights(package: Package, tmp_path: Path) -> None:
    other = export_package(write_tiny("llama", tmp_path / "other", seed=1), tmp_path / "package2")
    assert other.content_hash != package.content_hash


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_the_fingerprint_follows_the_files(source: Path, name: str) -> None:
    before = fingerprint(source)
    os.utime(source / "model.safetensors", ns=(1, 1))
    assert fingerprint(source) == before, "it is of the content"
    with (source / name).open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"?")
    assert fingerprint(source) != before


@pytest.mark.parametrize(
    "name", ["carryall.json", "model.onnx", "model.onnx.data", "config.json", "tokenizer.json"]
)
def test_a_missing_file_is_named(package: Package, name: str) -> None:
    (package.path / name).unlink()
    with pytest.raises(PackageError, match=f"is not a complete package: {name} is missing"):
        Package.open(package.path)


def test_short_weights_are_named(package: Package) -> None:
    data = package.path / "model.onnx.data"
    os.truncate(data, data.stat().st_size - 4096)
    with pytest.raises(
        PackageError, match=r"model\.onnx\.data is damaged: it has \d+ bytes instead of \d+; export .* again"
    ):
        Package.open(package.path)


def test_a_damaged_graph_is_named(package: Package) -> None:
    package.model_path.write_bytes(b"\xff" * 100)
    with pytest.raises(PackageError, match=r"model\.onnx is damaged"):
        Package.open(package.path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format_version": 3}, "format version 3; this carryall reads 1 and 2; export the model again"),
        ({"format_version": True}, "format version True"),
        ({"format_version": 1}, "the entry of file '.*' must hold 'size' and 'sha256', found "),
        ({"format_version": None}, "format version None"),
        ({"eos_token_ids": 7}, "'eos_token_ids' has the invalid value 7"),
        ({"eos_token_ids": [True]}, r"'eos_token_ids' has the invalid value \[True\]"),
        ({"context_length": 0}, "'context_length' has the invalid value 0"),
        ({"context_length": 2**40}, "'context_length' has the invalid value 1099511627776"),
        ({"passes": [1]}, r"'passes' has the invalid value \[1\]"),
        ({"files": {"config.json": "abc"}}, "'config.json' must hold 'size' and 'sha256', found 'abc'"),
        ({"files": {"../x": {"size": 1, "sha256": ""}}}, r"'\.\./x' leads out of the folder"),
        ({"files": {}}, r"damaged: its content does not match record_sha256"),
        ({"bos_token_id": 5}, r"damaged: its content does not match record_sha256"),
    ],
)
def test_an_invalid_record_is_refused(package: Package, changes: dict[str, Any], words: str) -> None:
    edit_record(package, **changes)
    with pytest.raises(PackageError, match=words):
        Package.open(package.path)


@pytest.mark.parametrize("text", ["", "[]", '{"format_version": 2}', "[" * 10_000])
def test_a_damaged_record_is_refused(package: Package, text: str) -> None:
    (package.path / "carryall.json").write_text(text)
    with pytest.raises(PackageError, match=r"carryall\.json"):
        Package.open(package.path)


def test_a_package_may_be_moved(package: Package, tmp_path: Path) -> None:
    moved = shutil.move(package.path, tmp_path / "elsewhere")
    assert Package.open(Path(moved)).content_hash == package.content_hash


def test_weights_outside_of_the_package_are_refused(package: Package) -> None:
    model = onnx.load(package.model_path, load_external_data=False)
    external = next(tensor for tensor in model.graph.initializer if tensor.external_data)
    next(entry for entry in external.external_data if entry.key == "location").value = "../secret"
    onnx.save(model, package.model_path)
    record = dataclasses.replace(package.record, files=make_manifest(package.path, package.record.files))
    record.write(package.path)  # as an attacker who wants to read the secret would
    with pytest.raises(PackageError, match=r"stores weight '.*' in \.\./secret, which is not listed"):
        Package.open(package.path)


@pytest.mark.parametrize(
    "tokens", [{"bos_token_id": "<s>"}, {"eos_token_id": [3, -1]}, {"eos_token_id": 1.0}]
)
def test_invalid_token_ids_are_refused_before_any_work(tmp_path: Path, tokens: dict[str, Any]) -> None:
    source = write_tiny("llama", tmp_path / "checkpoint")
    (source / "generation_config.json").write_text(json.dumps(tokens))
    with pytest.raises(
        CheckpointError,
        match=f"'{next(iter(tokens))}' in config.json or generation_config.json must be a token id",
    ):
        check_paths(source, tmp_path / "package")


def test_two_exports_to_one_folder_leave_the_first(tmp_path: Path) -> None:
    out = tmp_path / "out"
    second = new_folder(out)
    second.__enter__()
    with new_folder(out) as first:
        (first / "name").write_text("first")
    with pytest.raises(OutputExistsError, match="out is not empty; choose another"):
        second.__exit__(None, None, None)
    assert (out / "name").read_text() == "first"
    assert list(tmp_path.iterdir()) == [out]
