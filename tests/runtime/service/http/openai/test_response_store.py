"""How much stored responses may take."""

from __future__ import annotations

import asyncio

import pytest

from carryall.runtime.service.http.openai.response_store import (
    EventLog,
    ResponseStore,
    StoredResponse,
    UnknownResponseError,
)


def stored(name: str, size: int = 0, owner: str | None = None) -> StoredResponse:
    return StoredResponse({"id": name}, [], [{"type": "message", "extra": "x" * size}], owner)


def kept(store: ResponseStore) -> list[str]:
    return [name for name in "abcd" if name in store]


def test_the_least_recently_used_go_first() -> None:
    store = ResponseStore(2)
    for name in "ab":
        store.add(stored(name))
    assert store.get("a", None).response == {"id": "a"}
    store.add(stored("c"))
    assert kept(store) == ["a", "c"]
    store.remove("a", None)
    store.drop("unknown")
    assert kept(store) == ["c"]
    with pytest.raises(UnknownResponseError):
        store.get("c", "another")


def test_events_count_and_are_followed() -> None:
    async def scenario() -> None:
        store = ResponseStore(100, most_bytes=10_000)
        old, new = stored("a"), stored("b")
        new.log = EventLog()
        for one in (old, new):
            store.add(one)
        reader = new.log.after(0)
        new.log.add([b"0", b"1", b"2"])
        assert await anext(reader) == b"12"
        later = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        new.log.add([b"x" * 9_950])
        store.count(new, 9_950)
        assert kept(store) == ["b"]  # the other had to go
        assert await later == b"x" * 9_950
        new.log.add([b"y" * 100])
        store.count(new, 100)
        assert kept(store) == []
        store.count(new)  # removed: nothing happens
        new.log.end()
        assert [piece async for piece in reader] == [b"y" * 100]

    asyncio.run(scenario())


def test_their_size_is_limited() -> None:
    async def scenario() -> None:
        store = ResponseStore(100, most_bytes=10_000)
        first = stored("a", 4000)
        first.task = asyncio.create_task(asyncio.sleep(60))
        store.add(first)
        store.add(stored("b", 4000))
        assert kept(store) == ["a", "b"]
        store.add(stored("c", 4000))
        assert kept(store) == ["b", "c"]
        await asyncio.wait([first.task])
        assert first.task.cancelled()
        store.add(stored("d", 20_000))  # too large itself
        assert kept(store) == []
        store.add(stored("a", 9000))
        assert kept(store) == ["a"]

    asyncio.run(scenario())
