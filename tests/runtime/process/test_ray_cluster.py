"""Folders that are sent to the nodes of a Ray cluster, and the addresses of clusters."""

from __future__ import annotations

import sys
import threading
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


@pytest.mark.parametrize("address", ["local", "auto"])
def test_a_cluster_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    def init(**options: Any) -> None:
        raise Exception("the node timed out")

    fake = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", fake)
    with pytest.raises(UsageError, match=f"there is no Ray cluster at {address}: the node timed out"):
        connect(address)


def test_a_local_cluster_lives_as_long_as_the_thread_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes end with that thread, so it must not be one that loads a model and ends."""
    threads: list[threading.Thread] = []
    fake = SimpleNamespace(
        is_initialized=lambda: bool(threads),
        init=lambda **options: threads.append(threading.current_thread()),
    )
    monkeypatch.setattr("carryall.runtime.process.ray_cluster._SHUTDOWN_SECONDS", 0.01)
    monkeypatch.setitem(sys.modules, "ray", fake)
    loading = threading.Thread(target=connect, args=("local",))
    loading.start()
    loading.join()
    (started,) = threads
    assert started is not loading
    started.join(0.1)
    assert started.is_alive()
    threads.clear()  # the cluster is shut down
    started.join(5)
    assert not started.is_alive()
