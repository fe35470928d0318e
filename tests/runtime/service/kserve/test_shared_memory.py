"""Regions of shared memory: what may be registered, and their bounds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from carryall.errors import RequestError, UnsupportedTaskError
from carryall.runtime.service.kserve.shared_memory import SharedMemory

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="offered on Linux only")


@pytest.fixture
def key() -> Iterator[str]:
    path = Path("/dev/shm") / f"carryall-test-{uuid4().hex}"
    path.write_bytes(bytes(range(100)))
    yield f"/{path.name}"
    path.unlink()


def test_a_region_is_the_clients_memory(key: str) -> None:
    memory = SharedMemory(allowed=True)
    memory.register("r", key, 10, 20)
    assert bytes(memory.region("r").part(5, 3)) == bytes([15, 16, 17])
    memory.region("r").part(0, 2)[:] = b"ab"
    assert (Path("/dev/shm") / key[1:]).read_bytes()[10:12] == b"ab"
    assert [region.name for region in memory.regions()] == ["r"]
    with pytest.raises(RequestError, match="exceed shared memory"):
        memory.region("r").part(15, 6)
    with pytest.raises(RequestError, match="already registered"):
        memory.register("r", key, 0, 1)
    memory.unregister("r")
    memory.unregister("r")
    with pytest.raises(RequestError, match="no shared memory region 'r'"):
        memory.region("r")


def test_it_is_off_unless_allowed(key: str) -> None:
    with pytest.raises(UnsupportedTaskError, match="--shared-memory"):
        SharedMemory(allowed=False).register("r", key, 0, 1)


@pytest.mark.parametrize("name", ["../etc/passwd", "..", "a/b", "", "/", ".hidden", "a\0b", "x" * 300])
def test_only_names_of_objects_are_opened(name: str) -> None:
    with pytest.raises(RequestError, match="is not a valid name of a shared memory object"):
        SharedMemory(allowed=True).register("r", name, 0, 1)


def test_links_and_sizes_are_checked(key: str) -> None:
    memory = SharedMemory(allowed=True)
    link = Path("/dev/shm") / f"carryall-test-{uuid4().hex}"
    link.symlink_to("/etc/hostname")
    try:
        with pytest.raises(RequestError, match="cannot open"):
            memory.register("r", link.name, 0, 1)
    finally:
        link.unlink()
    for offset, size in ((0, 101), (100, 1), (0, 0), (2**63, 2**63)):
        with pytest.raises(RequestError, match="has 100 bytes"):
            memory.register("r", key, offset, size)
    with pytest.raises(RequestError, match="cannot open"):
        memory.register("r", "carryall-test-none", 0, 1)
