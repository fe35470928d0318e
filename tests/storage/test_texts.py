"""Text files of users and models: UTF-8, of bounded size, and one line that says what is wrong."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from carryall.errors import PackageError, UsageError
from carryall.storage.paths import check_name, check_target, check_utf8
from carryall.storage.texts import MOST_BYTES, read_text
from carryall.storage.writing import write_whole


def test_a_text_is_read_and_small_ones_take_no_memory(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("é" * 1000, encoding="utf-8")
    tracemalloc.start()
    try:
        assert read_text(tmp_path / "a") == "é" * 1000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "most", "why"),
    [
        (b"a\xff", MOST_BYTES, "it is not UTF-8 text at byte 1"),
        (b"abc", 2, "it has more than 2 bytes"),
        (None, MOST_BYTES, "No such file"),
    ],
)
def test_refusals_name_the_file(content: bytes | None, most: int, why: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PackageError, match=f"{path} cannot be read: {why}"):
        read_text(path, PackageError, most=most)


def test_a_file_without_an_end_is_refused_soon(tmp_path: Path) -> None:
    path = tmp_path / "endless"
    path.touch()
    os.truncate(path, 1 << 40)  # takes no place on the disk
    with pytest.raises(UsageError, match="more than"):
        read_text(path)


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    check_name(tmp_path)
    check_name(tmp_path / "missing")
    for name in ("a\0b", "x" * 300):
        with pytest.raises(UsageError, match="is not a valid file name"):
            check_name(tmp_path / name)
        with pytest.raises(UsageError, match="cannot be read"):
            read_text(tmp_path / name)
    check_utf8(tmp_path / "é")
    with pytest.raises(UsageError, match="onnxruntime opens only UTF-8 paths"):
        check_utf8(tmp_path / "\udcff")


@pytest.mark.skipif(os.name == "nt", reason="pipes of POSIX")
def test_a_target_that_a_rename_would_destroy_is_refused(tmp_path: Path) -> None:
    """As root, writing a report to /dev/null would otherwise replace the device."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(UsageError, match="is not a regular file"):
            write_whole(tmp_path / name, "text")
    with pytest.raises(UsageError, match="is not a regular file"):
        check_target(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_text_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_whole(path, "one")
    write_whole(path, "two \udcff")
    assert path.read_text() == "two \\udcff"

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, os.strerror(28), str(self))

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match=f"{path}'"):
        write_whole(path, "three")
    assert path.read_text() == "two \\udcff"
    assert list(tmp_path.iterdir()) == [path]
