"""Cache entries are built once for all processes, and rebuilt when damaged."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from carryall.errors import UsageError
from carryall.storage import cache, hashes
from carryall.storage.cache import cache_key, cached_folder, discard, sweep_deleted
from carryall.storage.root import cache_root


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path))
    return tmp_path


class Builder:
    """A builder that writes two files and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "a.bin").write_bytes(b"a" * 1000)
        (folder / "sub").mkdir()
        (folder / "sub" / "b.bin").write_bytes(b"b" * 10)


def test_built_once_and_found_again(own_cache: Path) -> None:
    build = Builder()
    folder = cached_folder("kind", "key", build)
    assert folder == own_cache / "kind" / "key"
    assert cached_folder("kind", "key", build) == folder
    assert build.calls == 1
    assert (folder / "sub" / "b.bin").read_bytes() == b"b" * 10


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "a.bin").unlink(),
        lambda folder: (folder / "a.bin").write_bytes(b"a" * 999),
        lambda folder: flip(folder / "sub" / "b.bin"),
        lambda folder: (folder / "entry.json").unlink(),
        lambda folder: (folder / "entry.json").write_text("{"),
        lambda folder: (folder / "entry.json").write_text('{"a.bin": {}}'),
    ],
)
def test_a_damaged_entry_is_built_again(
    damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    build = Builder()
    damage(cached_folder("kind", "key", build))
    folder = cached_folder("kind", "key", build)
    assert build.calls == 2
    assert (folder / "a.bin").read_bytes() == b"a" * 1000
    assert "is damaged and is built again" in caplog.text


def test_touching_a_file_does_not_damage_it() -> None:
    build = Builder()
    os.utime(cached_folder("kind", "key", build) / "a.bin", (1, 1))
    cached_folder("kind", "key", build)
    assert build.calls == 1


def test_what_is_built_is_hashed_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that opens it next knows its hashes."""
    build = Builder()
    folder = cached_folder("kind", "key", build)
    monkeypatch.setattr(hashes, "_in_process", {})
    monkeypatch.setattr(hashes, "_hash", lambda path, compute: pytest.fail(f"{path} is hashed again"))
    assert cached_folder("kind", "key", build) == folder
    assert build.calls == 1


def test_a_failed_build_leaves_nothing_behind(own_cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        cached_folder("kind", "key", fail)
    assert list((own_cache / "kind").iterdir()) == []


def test_folders_of_killed_processes_are_deleted_by_the_next_build(own_cache: Path) -> None:
    for name in (".carryall.01234567", ".entry.89abcdef.deleted"):
        (own_cache / "kind" / name).mkdir(parents=True)
        (own_cache / "kind" / name / "half").write_text("x")
    (own_cache / "kind/.carryall.01234567.lock").touch()
    (own_cache / "kind/.file.89abcdef.deleted").touch()
    cached_folder("kind", "key", Builder())
    assert [path.name for path in (own_cache / "kind").iterdir()] == ["key"]


def test_a_killed_deletion_leaves_no_entry(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cached_folder("kind", "k" * 250, Builder())
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    discard(folder)
    assert not folder.exists()
    monkeypatch.undo()
    monkeypatch.setenv("CARRYALL_CACHE", str(own_cache))
    assert len(list((own_cache / "kind").iterdir())) == 1
    sweep_deleted(own_cache / "kind")
    assert list((own_cache / "kind").iterdir()) == []


def test_concurrent_builders_agree_on_one_folder(own_cache: Path) -> None:
    together = threading.Barrier(4, timeout=20)
    build = Builder()
    folders = []

    def slowly(folder: Path) -> None:
        together.wait()  # all found no entry and build at the same time
        build(folder)

    threads = [
        threading.Thread(target=lambda: folders.append(cached_folder("kind", "key", slowly)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert build.calls == 4
    assert folders == [own_cache / "kind" / "key"] * 4
    assert [path.name for path in (own_cache / "kind").iterdir()] == ["key"]


def test_keys_depend_on_facts_versions_and_format(monkeypatch: pytest.MonkeyPatch) -> None:
    key = cache_key(a=1, b=None)
    assert key == cache_key(b=None, a=1)
    assert key != cache_key(a=2, b=None)
    monkeypatch.setattr(cache, "_versions", lambda: {"onnxruntime": "0"})
    assert key != cache_key(a=1, b=None)
    monkeypatch.undo()
    monkeypatch.setattr(cache, "FORMAT", 0)
    assert key != cache_key(a=1, b=None)


def test_keys_depend_on_the_code_only_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = dict[tuple[str, str], str]()
    for code in ("some", "other"):
        monkeypatch.setattr(cache, "_code", lambda code=code: code)
        for setting in ("0", "1"):
            monkeypatch.setenv("CARRYALL_CACHE_CODE", setting)
            keys[code, setting] = cache_key(a=1)
    assert keys["some", "0"] == keys["other", "0"]
    assert len(set(keys.values())) == 3


def test_folder_is_in_the_home_unless_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARRYALL_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == Path.home() / ".cache" / "carryall"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert cache_root() == Path("/var/cache/me/carryall")


def test_the_code_is_known_by_content_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE_CODE", "1")

    def key_of(root: Path) -> str:
        monkeypatch.setattr(cache, "_PACKAGE_ROOT", root)
        cache._code.cache_clear()
        return cache_key(a=1)

    for name in ("one", "other"):
        (tmp_path / name / "exporter").mkdir(parents=True)
        (tmp_path / name / "exporter" / "graph.py").write_text("x = 1")
    os.utime(tmp_path / "other" / "exporter" / "graph.py", (1, 1))
    try:
        first = key_of(tmp_path / "one")
        assert key_of(tmp_path / "other") == first
        (tmp_path / "other" / "exporter" / "graph.py").write_text("x = 2")
        assert key_of(tmp_path / "other") != first
        (tmp_path / "one" / "exporter" / "graph.py").rename(tmp_path / "one" / "exporter" / "other.py")
        assert key_of(tmp_path / "one") != first
    finally:
        cache._code.cache_clear()


@pytest.mark.parametrize("kind", ["file", "below a file", "read-only", "long name"])
def test_a_cache_that_cannot_be_used_is_one_line_that_names_the_variable(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / ("place" * 60 if kind == "long name" else "place")
    if kind == "read-only":
        place.mkdir(mode=0o500)
        if os.access(place, os.W_OK):
            pytest.skip("this user may write everywhere")
    elif kind != "long name":
        place.write_text("")
    place = place / "below" if kind == "below a file" else place
    monkeypatch.setenv("CARRYALL_CACHE", str(place))
    with pytest.raises(
        UsageError, match=r"^CARRYALL_CACHE=.*place.* cannot be used: .*; set CARRYALL_CACHE to"
    ):
        cached_folder("kind", "key", Builder())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", "/proc/nowhere/below")
    with pytest.raises(UsageError, match=r"cannot be used: /proc/nowhere cannot be made: No such file"):
        cached_folder("kind", "key", Builder())


def age(folder: Path, hours: float) -> None:
    used = time.time() - hours * 3600
    os.utime(folder / "entry.json", (used, used))


def test_the_least_recently_used_entry_is_removed_first(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Builder()
    folders = [cached_folder("kind", name, build) for name in ("old", "used again", "young")]
    other = cached_folder("other", "old", build)
    for folder, hours in zip((*folders, other), (30, 40, 20, 50), strict=True):
        age(folder, hours)
    cached_folder("kind", "used again", build)
    monkeypatch.setenv("CARRYALL_CACHE_GB", "0.0000032")  # three entries of 1,010 bytes
    cached_folder("kind", "new", build)
    assert {path.name for path in (own_cache / "kind").iterdir()} == {"used again", "young", "new"}
    assert other.is_dir()


def test_entries_that_may_be_in_use_stay(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE_GB", "0")
    first, second = (cached_folder("kind", name, Builder()) for name in ("first", "second"))
    assert first.is_dir()
    assert second.is_dir()
    age(first, 2)
    third = cached_folder("kind", "third", Builder())
    assert not first.exists()
    assert second.is_dir()
    assert third.is_dir()


@pytest.mark.parametrize("size", ["many", "-1", "nan"])
def test_a_limit_that_is_no_size_is_an_error(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE_GB", size)
    with pytest.raises(UsageError, match="CARRYALL_CACHE_GB"):
        cached_folder("kind", "key", Builder())
