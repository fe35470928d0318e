"""The user's secret key: created once, private to the user, refused when damaged or readable by others."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from carryall.errors import UsageError
from carryall.storage.secret import KV_KEY_VARIABLE, kv_key


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(KV_KEY_VARIABLE, raising=False)
    return tmp_path / "cache"


def test_a_secret_is_created_once_and_private(own_cache: Path) -> None:
    keys: list[bytes] = []
    threads = [threading.Thread(target=lambda: keys.append(kv_key())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(keys) == 8
    assert set(keys) == {kv_key()}
    assert len(keys[0]) == 32
    assert [path.name for path in own_cache.iterdir()] == ["kv.key"]
    assert (own_cache / "kv.key").stat().st_mode & 0o777 == 0o600


def test_each_cache_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kv_key()
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "other"))
    assert kv_key() != first


def test_the_variable_overrides_the_file(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KV_KEY_VARIABLE, "a shared passphrase")
    first = kv_key()
    assert (len(first), own_cache.exists()) == (32, False)
    monkeypatch.setenv(KV_KEY_VARIABLE, "a shared passphrasf")
    assert kv_key() != first
    monkeypatch.setenv(KV_KEY_VARIABLE, "short")
    with pytest.raises(UsageError, match=f"{KV_KEY_VARIABLE} has 5 characters; it needs 16"):
        kv_key()


def test_a_damaged_or_shared_key_file_is_refused(own_cache: Path) -> None:
    kv_key()
    (own_cache / "kv.key").chmod(0o644)
    with pytest.raises(UsageError, match=r"kv\.key can be read by other users: chmod 600"):
        kv_key()
    (own_cache / "kv.key").chmod(0o600)
    (own_cache / "kv.key").write_bytes(b"short")
    with pytest.raises(UsageError, match=r"kv\.key is damaged: it holds 5 bytes instead of 32; delete it"):
        kv_key()


@pytest.mark.parametrize("kind", ["a folder", "a link to nothing"])
def test_a_key_file_that_is_no_file_is_named(kind: str, own_cache: Path) -> None:
    own_cache.mkdir()
    key = own_cache / "kv.key"
    if kind == "a folder":
        key.mkdir()
    else:
        key.symlink_to("nothing")
    with pytest.raises(UsageError, match=r"kv\.key cannot be read: .*; delete it"):
        kv_key()


def test_an_unusable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"CARRYALL_CACHE=.*file cannot be used: Not a directory"):
        kv_key()
