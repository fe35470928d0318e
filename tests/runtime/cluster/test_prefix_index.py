"""Which replicas hold which beginnings of prompts, after eviction too."""

from __future__ import annotations

from carryall.runtime.cluster.prefix_index import PrefixIndex

RULES = [b"a", b"b"]


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_longest_beginning_of_each_replica_is_found() -> None:
    index = PrefixIndex()
    index.use([*RULES, b"c", b"d"], "first")
    index.use([*RULES, b"x"], "second")
    assert index.held([*RULES, b"c", b"e"]) == {"first": 3, "second": 2}
    assert index.held([*RULES, b"x"]) == {"first": 2, "second": 3}
    assert index.held([b"z", b"c"]) == {}
    assert index.held([]) == {}


def test_a_beginning_counts_only_without_gaps() -> None:
    index = PrefixIndex(capacity=4)
    index.use([b"a", b"b", b"c", b"d"], "first")
    index.use([b"e"], "first")  # takes the place of the first chunk
    assert index.held([b"a", b"b", b"c"]) == {}


def test_what_was_not_used_since_the_last_eviction_is_forgotten() -> None:
    clock = Clock()
    index = PrefixIndex(clock)
    index.use([b"old"], "first")
    index.use([b"old"], "second")
    clock.now += 60
    index.use([b"new"], "first")
    clock.now += 10
    index.holds_since("first", None)
    assert index.held([b"old"]) == {"first": 1, "second": 1}
    index.holds_since("first", 40.0)
    assert index.held([b"old"]) == {"second": 1}
    assert index.held([b"new"]) == {"first": 1}
    clock.now += 10
    index.holds_since("first", 30.0)  # nothing more was evicted
    assert index.held([b"new"]) == {"first": 1}
    index.use([b"old"], "first")
    assert index.held([b"old"]) == {"first": 1, "second": 1}
