"""A store in the memory of a process: its limit, and URLs that are refused."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall.errors import UsageError
from carryall.runtime.engine.kv.tiers.bounded_store import BoundedStore
from carryall.runtime.engine.kv.tiers.served_store import DirectStore, ServedStore
from carryall.runtime.engine.kv.tiers.store_urls import open_store

NAMES = st.sampled_from("abcdef")


@given(st.lists(st.one_of(st.tuples(NAMES, st.integers(0, 60)), NAMES)))
def test_the_least_recently_used_chunks_go_first(calls: list[tuple[str, int] | str]) -> None:
    store, model = ServedStore("serve://100"), OrderedDict[str, bytes]()
    for call in calls:
        if isinstance(call, str):
            assert store.get(call) == model.get(call)
            if call in model:
                model.move_to_end(call)
        else:
            name, size = call
            store.put(name, bytes(size))
            model.pop(name, None)
            model[name] = bytes(size)
            while sum(map(len, model.values())) > 100:
                model.popitem(last=False)
        assert store.exist("abcdef") == [name in model for name in "abcdef"]
        assert store.held("abcdef", 1.0) == ([name in model for name in "abcdef"] + [False]).index(False)


def test_a_chunk_that_does_not_fit_is_dropped() -> None:
    store = ServedStore("serve://100")
    store.put("a", bytes(101))
    assert store.get("a") is None
    store.put("b", bytes(100))
    assert store.last_held(["b", "a"], 1.0) == 1
    store.close()
    assert store.held(["b"], 1.0) == 0


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("serve://much", "prefix_cache_url"),
        ("serve://0", "prefix_cache_url"),
        ("grpc://host", "such as grpc://host:8001"),
        ("grpc://:8001", "such as grpc://host:8001"),
        ("grpc://host:port", "such as grpc://host:8001"),
    ],
)
def test_urls_that_cannot_be_used_are_refused(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_store(url)


def test_schemes_have_their_stores() -> None:
    assert isinstance(open_store("serve://"), ServedStore)
    for url in ("grpc://host:8001", "grpcs://host:8001/", "grpc://[::1]:8001"):
        store = open_store(url)
        assert isinstance(store, BoundedStore)
        assert isinstance(store.client, DirectStore)
        store.close()
