"""Objects from before a block are not collected inside it, and are afterwards."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest

from carryall.runtime.process.garbage import collector_paused, exclude_newer, lasting_objects


class Cycle:
    """An object that only the garbage collector frees."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _unfrozen() -> Iterator[None]:
    assert gc.get_freeze_count() == 0
    yield
    assert gc.get_freeze_count() == 0


def made() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


def test_objects_older_than_the_freeze_are_not_collected() -> None:
    older = made()
    with lasting_objects():
        newer = made()
        gc.collect()
        assert older() is not None
        assert newer() is None
    gc.collect()
    assert older() is None


def test_blocks_overlap() -> None:
    older = made()
    first, second = lasting_objects(), lasting_objects()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    gc.collect()
    assert older() is not None
    second.__exit__(None, None, None)
    gc.collect()
    assert older() is None


def test_a_failed_block_ends_too() -> None:
    with pytest.raises(ZeroDivisionError), lasting_objects():
        raise ZeroDivisionError


@pytest.mark.long
def test_inside_a_block_dropped_objects_are_freed_and_newer_ones_excluded() -> None:
    older = made()
    with lasting_objects():
        newer, garbage = Cycle(), made()
        kept = weakref.ref(newer)
        exclude_newer()
        assert garbage() is None
        assert older() is not None
        del newer
        gc.collect()
        exclude_newer()
        assert kept() is not None
        exclude_newer(dropped=True)
        assert kept() is None
        assert older() is None


def test_outside_of_blocks_nothing_is_excluded() -> None:
    exclude_newer()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_as_before_after_an_error(was_on: bool) -> None:
    if not was_on:
        gc.disable()
    try:
        with contextlib.suppress(ValueError), collector_paused():
            assert not gc.isenabled()
            raise ValueError("fails")
        assert gc.isenabled() == was_on
    finally:
        gc.enable()
