"""Cached hashes equal the hash of the content, also with concurrent writers and damaged records."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall.storage import hashes, manifest
from carryall.storage.hashes import FolderHashes, content_key, forget_missing_folders
from carryall.storage.paths import link_stays_inside, stays_inside


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hashes, "_in_process", {})
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_bytes(b"a" * 1000)
    return tmp_path / "folder"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were hashed."""
    seen: list[str] = []
    digest = hashlib.file_digest

    def noted(file: Any, name: Any) -> Any:
        seen.append(Path(file.name).name)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    return seen


def hash_file(folder: Path, name: str = "a", *, reread: bool = False) -> str:
    with FolderHashes(folder) as known:
        return known.sha256(name, reread=reread)


def forget_process() -> None:
    hashes._in_process.clear()


FACTORS = [pow(0x9E3779B97F4A7C15, power, 1 << 64) for power in range(1, 513)]


def sum_of_page(page: bytes) -> bytes:
    words = struct.unpack("<512Q", page.ljust(4096, b"\0"))
    total = sum(word * factor for word, factor in zip(words, FACTORS, strict=True))
    return struct.pack("<Q", total % (1 << 64))


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3 * 8192 + 5, 5 * 8192])
def test_the_sums_of_a_file_are_those_of_its_pages(
    folder: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "_PART_BYTES", 3 * 4096)
    monkeypatch.setattr(hashes, "_READ_BYTES", 2 * 4096)
    content = os.urandom(size)
    (folder / "a").write_bytes(content)
    parts = [sum_of_page(content[at : at + 4096]) for at in range(0, size, 4096)]
    with FolderHashes(folder) as known:
        assert known.sums("a") == hashlib.sha256(b"".join(parts)).hexdigest()
        assert known.sha256("a") == hashlib.sha256(content).hexdigest()


def changed_bit(content: bytearray) -> None:
    content[5000] ^= 1


def exchanged_words(content: bytearray) -> None:
    content[8:16], content[800:808] = content[800:808], content[8:16]


def exchanged_pages(content: bytearray) -> None:
    content[:4096], content[4096:8192] = content[4096:8192], content[:4096]


def zeros(content: bytearray) -> None:
    content[-512:] = bytes(512)


@pytest.mark.parametrize("damage", [changed_bit, exchanged_words, exchanged_pages, zeros])
def test_large_files_of_a_manifest_are_checked_by_the_sums_of_pages(
    folder: Path, damage: Callable[[bytearray], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "LARGE_BYTES", 100)
    (folder / "small").write_bytes(b"s" * 100)
    content = bytearray(os.urandom(3 * 4096))
    (folder / "a").write_bytes(content)
    facts = manifest.make_manifest(folder, ["a", "small"], sums=True)
    assert facts["a"].sha256.startswith(manifest.SUMS)
    assert facts["small"].sha256 == hashlib.sha256(b"s" * 100).hexdigest()
    assert list(manifest.find_damage(folder, facts)) == []
    damage(content)
    (folder / "a").write_bytes(content)
    assert list(manifest.find_damage(folder, facts)) == [("a", "differs from the recorded sha256")]


def test_a_file_is_read_once_in_all_processes(folder: Path, reads: list[str]) -> None:
    expected = hashlib.sha256(b"a" * 1000).hexdigest()
    for _ in range(3):
        assert hash_file(folder) == expected
        forget_process()
    assert reads == ["a"]
    assert hash_file(folder, reread=True) == expected
    assert reads == ["a", "a"]


def test_a_change_in_place_is_found_at_any_file_times(folder: Path) -> None:
    path = folder / "a"
    for number in range(20):
        before = path.stat()
        hash_file(folder)
        path.write_bytes(bytes([number]) * 1000)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert hash_file(folder) == hashlib.sha256(bytes([number]) * 1000).hexdigest()


def test_a_renamed_folder_is_still_known_to_the_process(folder: Path, reads: list[str]) -> None:
    hash_file(folder)
    folder.rename(folder.with_name("other"))
    hash_file(folder.with_name("other"))
    forget_process()
    hash_file(folder.with_name("other"))
    assert reads == ["a"]


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.file_digest

    def slow(file: Any, name: Any) -> Any:
        found = digest(file, name)
        (folder / "a").write_bytes(b"b" * 1000)
        return found

    monkeypatch.setattr(hashlib, "file_digest", slow)
    hash_file(folder)
    monkeypatch.undo()
    assert hash_file(folder) == hashlib.sha256(b"b" * 1000).hexdigest()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"files": 3}',
        '{"files": {"a": [1]}}',
        '{"files": {"a": ["x", 1, 1, 1, ""]}}',
        "[" * 9999,
    ],
)
def test_a_damaged_record_makes_the_file_hashed_again(
    text: str, folder: Path, own_cache: Path, reads: list[str]
) -> None:
    expected = hash_file(folder)
    (record,) = (own_cache / "hashes").glob("*.json")
    record.write_text(text)
    forget_process()
    assert hash_file(folder) == expected
    assert reads == ["a", "a"]
    assert json.loads(record.read_text())["files"]["a"][-1] == expected


@pytest.mark.parametrize("kind", ["a file", "below a file"])
def test_without_a_cache_each_process_hashes_once(
    kind: str, tmp_path: Path, folder: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / ("file" if kind == "a file" else "file/below")))
    assert hash_file(folder) == hash_file(folder)
    assert reads == ["a"]


def test_a_cache_that_may_only_be_read_is_read(
    folder: Path, own_cache: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hash_file(folder)
    forget_process()

    def refused(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "write_text", refused)
    hash_file(folder)
    assert reads == ["a"]
    (folder / "b").touch()
    hash_file(folder, "b")
    assert reads == ["a", "b"]
    assert [path.suffix for path in (own_cache / "hashes").iterdir()] == [".json"]


def test_concurrent_writers_leave_one_valid_record(folder: Path, own_cache: Path) -> None:
    for number in range(16):
        (folder / str(number)).write_bytes(bytes([number]) * 100)
    threads = [threading.Thread(target=hash_file, args=(folder, str(number))) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    (record,) = (own_cache / "hashes").iterdir()
    for name, (*_, digest) in json.loads(record.read_text())["files"].items():
        assert digest == hashlib.sha256(bytes([int(name)]) * 100).hexdigest()


def test_content_key_depends_on_names_and_content(folder: Path, tmp_path: Path) -> None:
    (folder / "b").write_bytes(b"b")
    key = content_key(folder, ["a", "b"])
    assert key == content_key(folder, ["b", "a", "a"])
    assert key == content_key(Path(shutil.copytree(folder, tmp_path / "copy")), ["a", "b"])
    assert key != content_key(folder, ["a"])
    (folder / "b").write_bytes(b"c")
    assert key != content_key(folder, ["a", "b"])


def test_records_of_deleted_folders_are_removed(folder: Path, own_cache: Path, tmp_path: Path) -> None:
    hash_file(folder)
    hash_file(Path(shutil.copytree(folder, tmp_path / "kept")))
    shutil.rmtree(folder)
    assert forget_missing_folders() == 1
    assert len(list((own_cache / "hashes").iterdir())) == 1


def test_hashing_waits_for_a_new_file_and_does_not_cache_whole_second_times(folder: Path) -> None:
    now = time.time_ns()

    def stat(ctime: int) -> os.stat_result:
        return os.stat_result((0,) * 10, {"st_ctime_ns": ctime, "st_mtime_ns": ctime})

    assert hashes._wait_for_next_tick(stat(now - 10**8))
    begin = time.perf_counter()
    assert hashes._wait_for_next_tick(stat(time.time_ns()))
    assert time.perf_counter() - begin > 0.7 * hashes._TICK
    assert not hashes._wait_for_next_tick(stat(time.time_ns() // 10**9 * 10**9))  # a clock of whole seconds
    assert not hashes._wait_for_next_tick(stat(time.time_ns() + 10**12))  # of another clock


@pytest.mark.parametrize("name", ["a", "a/b", "model.onnx.data", "..a", "a..", "...", " "])
def test_names_inside(name: str) -> None:
    assert stays_inside(name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", "a/../b", "/a", "\\a", "C:\\a", "C:a", "\\\\host\\share\\a", "a\0b", None, 3],
)
def test_names_outside_of_the_folder_are_refused(name: object) -> None:
    assert not stays_inside(name)


@given(parts=st.lists(st.sampled_from(["..", ".", "a", "b", "", "C:", "\\", "/"]), max_size=6))
def test_accepted_names_stay_inside_the_folder(parts: list[str]) -> None:
    name = "/".join(parts)
    if stays_inside(name):
        assert os.path.normpath(os.path.join("/base/folder", name)).startswith("/base/folder/")


def test_links_are_resolved(tmp_path: Path, folder: Path) -> None:
    (folder / "link").symlink_to("a")
    (folder / "out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "alias").symlink_to(folder)
    assert link_stays_inside(folder / "link", folder)
    assert link_stays_inside(tmp_path / "alias" / "a", tmp_path / "alias")
    assert not link_stays_inside(folder / "out", folder)
