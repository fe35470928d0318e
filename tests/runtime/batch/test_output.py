"""Result files: never half under their final name, and resumable after any cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from carryall.errors import OutputExistsError, UsageError
from carryall.runtime.batch.output import ResultFile, write_result


def result(custom_id: str | None, *, failed: bool = False) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "response": None if failed else {},
        "error": {"code": "e"} if failed else None,
    }


def write(file: ResultFile, *records: dict[str, Any]) -> None:
    with file.open() as stream:
        for record in records:
            write_result(stream, record)


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_the_final_name_appears_when_the_run_is_complete(target: Path) -> None:
    file = ResultFile(target)
    file.start(overwrite=False)
    with file.open() as stream:
        write_result(stream, result("ü"))
        assert not target.exists()
        partial = target.with_name("out.jsonl.partial")
        assert ids(partial) == ["ü"]  # written through, not buffered
    assert ids(target) == ["ü"]
    assert not partial.exists()


def test_an_error_leaves_the_partial_file(target: Path) -> None:
    with pytest.raises(TypeError, match="JSON"):
        write(ResultFile(target), result("a"), {"custom_id": object()})
    assert not target.exists()
    with pytest.raises(OutputExistsError, match="unfinished run; --resume"):
        ResultFile(target).start(overwrite=False)
    file = ResultFile(target)
    assert file.resume() == {"a"}
    write(file, result("b"))
    assert ids(target) == ["a", "b"]


def test_existing_results_are_kept_unless_asked(target: Path) -> None:
    write(ResultFile(target), result("a"))
    with pytest.raises(OutputExistsError, match="--overwrite replaces it"):
        ResultFile(target).start(overwrite=False)
    file = ResultFile(target)
    file.start(overwrite=True)
    assert ids(target) == ["a"]  # until there is something better
    write(file, result("b"))
    assert ids(target) == ["b"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere is no folder"):
        ResultFile(tmp_path / "nowhere" / "out.jsonl").start(overwrite=False)


def test_resume_drops_failures_and_a_torn_line(target: Path) -> None:
    partial = target.with_name("out.jsonl.partial")
    lines = [
        json.dumps(record) for record in (result("a"), result("b", failed=True), result(None, failed=True))
    ]
    whole = json.dumps(result("c"))
    for cut in range(len(whole)):
        partial.write_text("\n".join([*lines, whole[:cut]]))
        assert ResultFile(target).resume() == {"a"}
        assert ids(partial) == ["a"]
    partial.write_text("\n".join([*lines, whole, ""]))
    assert ResultFile(target).resume() == {"a", "c"}


def test_resume_of_a_complete_file_goes_on_from_it(target: Path) -> None:
    write(ResultFile(target), result("a"))
    file = ResultFile(target)
    assert file.resume() == {"a"}
    write(file, result("b"))
    assert ids(target) == ["a", "b"]


def test_resume_without_results_starts(target: Path) -> None:
    file = ResultFile(target)
    assert file.resume() == set()
    write(file, result("a"))
    assert ids(target) == ["a"]


@pytest.mark.parametrize("content", ["no json\n", "[]\n", '{"a": 1}\n'])
def test_resume_refuses_another_kind_of_file(target: Path, content: str) -> None:
    target.write_text(content)
    with pytest.raises(UsageError, match=r"line 1 of .* is not a batch result"):
        ResultFile(target).resume()
    assert target.read_text() == content
