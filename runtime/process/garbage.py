"""Keep the garbage collector away from work that it only slows down."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_blocks = 0


@contextlib.contextmanager
def lasting_objects() -> Iterator[None]:
    """Exclude all objects that exist now from garbage collection until the end of the block.

    A full collection looks at every object, and no thread runs meanwhile: 60 to 120 ms with one model and its
    libraries, for about every thousand short requests. Cycles among the excluded objects are freed after the
    block. Blocks may overlap.
    """
    global _blocks
    with _lock:
        _blocks += 1
        gc.freeze()
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks:
                gc.unfreeze()


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector within the block, for work that makes many objects and little garbage.

    A vocabulary and a graph are hundreds of thousands of objects, which each collection visits again: a fifth
    of the time of preparing a model.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def exclude_newer(*, dropped: bool = False) -> None:
    """Inside a block, free the garbage among objects that are not excluded, and exclude the others of them.

    Call it after large objects were made or dropped. Outside of blocks, it does nothing.

    Args:
        dropped: look at excluded objects too, which are not freed otherwise if they are in cycles. It takes
            as long as a full collection.
    """
    with _lock:
        if _blocks:
            if dropped:
                gc.unfreeze()
            gc.collect()
            gc.freeze()
