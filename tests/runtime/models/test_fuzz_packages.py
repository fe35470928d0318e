"""Whole packages from strangers: an error of ours or an answer, whatever one of the files holds.

A file is damaged, and the record is either left, which must be noticed, or written again with the new hashes,
as a stranger who makes a package would.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzzing import damaged, fuzz, seeds
from hostile_json import changed
from hypothesis import strategies as st
from tiny_models import write_tiny

from carryall import LLM, SamplingParams
from carryall.errors import CarryallError, PackageError
from carryall.exporter.export import export_package
from carryall.exporter.package_record import read_record
from carryall.storage.manifest import make_manifest

PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
KEPT = seeds("packages")  # named by the file that they replace: WHAT.FILE


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("package")
    return export_package(write_tiny("llama", root / "source"), root / "package").path


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARRYALL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def encoded(document: object) -> bytes:
    return json.dumps(document).encode()


def answer(folder: Path) -> list[int]:
    with LLM(str(folder), max_slots=1) as llm:
        return list(llm.generate([[1, 2, 3]], PARAMS)[0].outputs[0].token_ids)


def check(package: Path, spare: Path, name: str, content: bytes, resealed: bool, expected: list[int]) -> None:
    """Answer with a package one of whose files has another content."""
    folder = spare / "package"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(os.environ["CARRYALL_CACHE"], ignore_errors=True)
    shutil.copytree(package, folder)
    same = (folder / name).read_bytes() == content
    (folder / name).write_bytes(content)
    if resealed:
        record = read_record(folder / "carryall.json")
        dataclasses.replace(record, files=make_manifest(folder, record.files)).write(folder)
    try:
        found = answer(folder)
    except CarryallError as error:
        assert "\n" not in str(error)  # noqa: PT017
        assert resealed or isinstance(error, PackageError)  # noqa: PT017
        return
    assert resealed or same
    assert not same or found == expected


@pytest.mark.parametrize("seed", KEPT, ids=lambda path: path.name)
def test_kept_files(seed: Path, package: Path, tmp_path: Path) -> None:
    name = seed.name.partition(".")[2]
    check(package, tmp_path, name, seed.read_bytes(), resealed=True, expected=[])


@pytest.mark.parametrize("examples", [8, pytest.param(None, marks=pytest.mark.slow)])
def test_any_file_of_a_package_is_used_or_refused(
    examples: int | None, package: Path, tmp_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in package.iterdir() if path.name != "carryall.json"}
    documents = {name: json.loads(files[name]) for name in JSON_FILES if name in files}
    by_bytes = st.sampled_from(sorted(files)).flatmap(
        lambda name: st.tuples(st.just(name), damaged(files[name]))
    )
    by_value = st.sampled_from(sorted(documents)).flatmap(
        lambda name: st.tuples(st.just(name), changed(documents[name]).map(encoded))
    )
    expected = answer(package)
    fuzz(
        st.tuples(by_bytes | by_value, st.sampled_from([True, True, True, False])),
        lambda drawn: check(package, tmp_path, drawn[0][0], drawn[0][1], drawn[1], expected),
        examples,
    )
