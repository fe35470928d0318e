"""Files of the same content have one key; what is only like it has its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from carryall.errors import CheckpointError
from carryall.storage import known_contents
from carryall.storage.file_identity import OpenFile, identity_of
from carryall.storage.known_contents import joint_content, known_key, learn_content

SIZE = 3 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def key(*paths: Path) -> str:
    return known_key(identity_of(paths), paths)


def learn(*paths: Path) -> None:
    files = [OpenFile(path) for path in paths]
    for file in files:
        file.watch()
        file.read(0, file.size)
    contents = [content for file in files if (content := file.content()) is not None]
    learn_content(identity_of(paths), joint_content(contents))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(os.urandom(SIZE))
    second.write_bytes(os.urandom(SIZE + 100))
    return first, second


def test_copies_have_the_key_of_the_original(tmp_path: Path, files: tuple[Path, Path]) -> None:
    original = key(*files)
    learn(*files)
    assert key(*files) == original
    copies = [Path(shutil.copyfile(file, tmp_path / f"{file.name}-copy")) for file in files]
    assert identity_of(copies).own != original
    assert key(*copies) == original == key(*copies)
    os.utime(files[0], (5, 5))
    assert key(*files) == original
    assert key(*reversed(files)) != original


def test_the_original_and_a_known_copy_are_not_read_again(
    tmp_path: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(*files)
    copies = [Path(shutil.copyfile(file, tmp_path / f"{file.name}-copy")) for file in files]
    original = key(*copies)
    monkeypatch.setattr(known_contents, "_sums", lambda path: pytest.fail(f"{path} is read"))
    assert key(*files) == original == key(*copies)


def test_a_copy_of_what_was_never_read_has_its_own_key(tmp_path: Path, files: tuple[Path, Path]) -> None:
    assert key(files[0]) != key(Path(shutil.copyfile(files[0], tmp_path / "copy")))


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_other_byte_is_another_key(tmp_path: Path, files: tuple[Path, Path], when: str) -> None:
    """Also where a copy of the first content is known already."""
    original = key(files[0])
    learn(files[0])
    copy = Path(shutil.copyfile(files[0], tmp_path / "copy"))
    if when == "after":
        assert key(copy) == original
    with copy.open("r+b") as file:
        file.seek(SIZE // 2 + 20_000)
        byte = file.read(1)[0]
        file.seek(SIZE // 2 + 20_000)
        file.write(bytes([byte ^ 1]))
    os.utime(copy, (7, 7))
    assert identity_of([copy]).likeness == identity_of([files[0]]).likeness
    assert key(copy) == identity_of([copy]).own != original


def test_content_is_only_told_of_files_that_were_read(files: tuple[Path, Path]) -> None:
    file = OpenFile(files[0])
    assert file.content() is None
    file.watch()
    file.read(0, SIZE // 4)
    assert file.content() is None
    files[0].write_bytes(os.urandom(SIZE))
    with pytest.raises(CheckpointError, match="replaced or changed"):
        file.read(SIZE // 4, SIZE // 2)


def test_a_cache_that_cannot_be_written_knows_nothing(
    tmp_path: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "file"))
    learn(*files)
    copy = shutil.copyfile(files[0], tmp_path / "copy")
    assert key(files[0]) == identity_of(files[:1]).own != key(Path(copy))
