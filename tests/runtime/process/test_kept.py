"""Results are kept up to a number of bytes, and those used last stay."""

from __future__ import annotations

from carryall.runtime.process.kept import Kept


def keys(kept: Kept[bytes], *names: bytes) -> list[bytes]:
    return [name for name in names if kept.get(name) is not None]


def test_the_least_recently_used_go_first() -> None:
    kept = Kept[bytes](len, 10)
    kept.put(b"a", b"1234")
    kept.put(b"b", b"1234")
    assert kept.get(b"a") == b"1234"
    kept.put(b"c", b"1234")
    assert keys(kept, b"a", b"b", b"c") == [b"a", b"c"]


def test_another_result_of_a_key_replaces_it() -> None:
    kept = Kept[bytes](len, 10)
    kept.put(b"a", b"12345678")
    kept.put(b"a", b"1")
    kept.put(b"b", b"123456789")
    assert keys(kept, b"a", b"b") == [b"a", b"b"]
    assert kept.get(b"a") == b"1"


def test_the_newest_stays_however_large_it_is() -> None:
    kept = Kept[bytes](len, 10)
    kept.put(b"a", b"1")
    kept.put(b"b", bytes(100))
    assert keys(kept, b"a", b"b") == [b"b"]
    kept.put(b"c", b"1")
    assert keys(kept, b"b", b"c") == [b"c"]


def test_nothing_is_left_of_forgotten_results() -> None:
    kept = Kept[bytes](len, 10)
    kept.put(b"a", b"12345678")
    kept.clear()
    kept.put(b"b", b"12345")
    kept.put(b"c", b"12345")
    assert keys(kept, b"a", b"b", b"c") == [b"b", b"c"]
