"""JSON objects in the cache: computed once, and again if the file is damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carryall.storage.remembered import FACTS, remembered

KNOWN = {"sizes": [1, 2], "lowered": False, "limit": None}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / FACTS


def unexpected() -> dict[str, Any]:
    raise AssertionError("it should be known")


def test_an_object_is_computed_once_for_each_key(folder: Path) -> None:
    assert remembered("one", lambda: KNOWN) == KNOWN
    assert remembered("one", unexpected) == KNOWN
    assert remembered("two", lambda: {"other": 1}) == {"other": 1}
    assert sorted(path.name for path in folder.iterdir()) == ["one.json", "two.json"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def change_a_value(path: Path) -> None:
    path.write_text(path.read_text().replace("false", "true"))


def change_the_hash(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "sha256": "0" * 64}))


def exchange(path: Path) -> None:
    remembered("two", lambda: {"other": 1})
    path.with_name("two.json").replace(path)


def nest(path: Path) -> None:
    path.write_text("[" * 100_000)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def noise(path: Path) -> None:
    path.write_bytes(bytes(range(256)))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [cut, change_a_value, change_the_hash, exchange, nest, empty, noise, pipe])
def test_a_damaged_file_is_computed_again(damage: Callable[[Path], None], folder: Path) -> None:
    remembered("one", lambda: KNOWN)
    damage(folder / "one.json")
    again = {"computed": "again"}
    assert remembered("one", lambda: again) == again
    if damage is not pipe:  # it is left alone
        assert remembered("one", unexpected) == again


def test_without_a_cache_every_call_computes(folder: Path) -> None:
    folder.parent.write_text("a file in the place of the cache")
    assert remembered("one", lambda: KNOWN) == KNOWN
    assert remembered("one", lambda: {"computed": "again"}) == {"computed": "again"}
