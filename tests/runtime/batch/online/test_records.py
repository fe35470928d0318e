"""Records and files on disk: they outlive the process, are listed in order, and are their owner's alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from carryall.errors import RequestError, UnknownObjectError, UsageError
from carryall.runtime.batch.online.files import FileStore, StoredFile, expiry_seconds


def add(store: FileStore, content: str, owner: str | None = None, **options: Any) -> StoredFile:
    path = store.upload_path()
    path.write_text(content)
    return store.add(path, filename="in.jsonl", purpose="batch", owner=owner, **options)


def test_files_outlive_the_process(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    files = [add(store, f"{n}") for n in range(4)]
    store.upload_path().write_text("cut off")
    store.delete(files[1].id, None)
    store = FileStore(tmp_path)
    assert list((tmp_path / "uploads").iterdir()) == []
    assert store.content(files[2].id, None).read_text() == "2"
    assert store.get(files[3].id, None) == files[3]
    for action in (store.get, store.content, store.delete):
        with pytest.raises(UnknownObjectError, match=f"no file '{files[1].id}'"):
            action(files[1].id, None)
    assert [file["id"] for file in store.page(None)[0]] == [files[n].id for n in (3, 2, 0)]


def test_a_list_has_pages(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    ids = [add(store, f"{n}").id for n in range(5)]
    page, more = store.page(None, limit=2)
    assert ([file["id"] for file in page], more) == ([ids[4], ids[3]], True)
    page, more = store.page(None, limit=3, after=ids[3])
    assert ([file["id"] for file in page], more) == ([ids[2], ids[1], ids[0]], False)
    page, more = store.page(None, limit=2, newest_first=False, purpose="batch")
    assert ([file["id"] for file in page], more) == (ids[:2], True)
    assert store.page(None, purpose="batch_output") == ([], False)
    with pytest.raises(UnknownObjectError, match="no file 'file-none'"):
        store.page(None, after="file-none")
    with pytest.raises(RequestError, match="'limit' must be at least 1"):
        store.page(None, limit=0)


def test_a_file_is_its_owners_alone(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    mine = add(store, "x", "me")
    assert store.get(mine.id, "me") == mine
    for owner in ("you", None):
        with pytest.raises(UnknownObjectError):
            store.content(mine.id, owner)
        assert store.page(owner) == ([], False)


def test_a_file_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    file = add(store, "x", expires_after=3600)
    assert file.expires_at == file.created_at + 3600
    assert store.get(file.id, None) == file
    monkeypatch.setattr(time, "time", lambda: file.created_at + 3601.0)
    with pytest.raises(UnknownObjectError):
        store.get(file.id, None)
    assert not list((tmp_path / "files").iterdir())


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "files" / "file-1").mkdir(parents=True)
    (tmp_path / "files" / "file-1" / "record.json").write_text('{"id": "file-1"}')
    with pytest.raises(UsageError, match=r"files cannot be used: .*missing"):
        FileStore(tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        *(5, {}, {"seconds": 3600}, {"anchor": "created_at", "seconds": 60}),
        *({"anchor": "last_used_at", "seconds": 3600}, {"anchor": "created_at", "seconds": 10**9}),
    ],
)
def test_a_time_to_expire_is_an_hour_to_a_month(given: Any) -> None:
    assert expiry_seconds("expires_after", {"anchor": "created_at", "seconds": "3600"}) == 3600
    with pytest.raises(RequestError, match="'expires_after' must be"):
        expiry_seconds("expires_after", given)
