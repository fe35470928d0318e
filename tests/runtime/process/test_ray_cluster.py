"""Folders that are sent to the nodes of a Ray cluster, and the addresses of clusters."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from carryall.errors import UsageError
from carryall.runtime.process.ray_cluster import connect, ship, unpacked


def test_a_folder_travels_as_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "node"))
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    (model / "a").write_bytes(b"1")
    (model / "sub" / "b").write_bytes(b"2")
    (model / "link").symlink_to(model / "a")  # as in the hub's cache
    archive = ship(str(model))
    assert archive is not None
    assert archive == ship(str(model))
    for _ in range(2):
        folder = unpacked("name", archive)
        found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
        assert sorted(found) == ["a", "link", "sub", "sub/b"]
        assert (found["link"].read_bytes(), found["sub/b"].read_bytes()) == (b"1", b"2")
        assert not found["link"].is_symlink()
    assert ship("demo") is None
    with pytest.raises(UsageError, match="is a file"):
        ship(str(model / "a"))


def test_local_is_a_cluster_of_its_own_beside_a_running_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    fake = SimpleNamespace(is_initialized=lambda: False, init=lambda **options: asked.append(options))
    monkeypatch.setitem(sys.modules, "ray", fake)
    connect("local")
    connect("auto")
    assert [options["address"] for options in asked] == ["local", "auto"]
