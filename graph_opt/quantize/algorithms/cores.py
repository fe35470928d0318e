"""All cores for independent work, each part of which takes one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

Item = TypeVar("Item")
Result = TypeVar("Result")
CORES = os.cpu_count() or 1


def on_all_cores(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return the results of ``work`` in the order of ``items``; re-raises its first error."""
    parts = list(items)
    if len(parts) < 2 or CORES == 1:
        return list(map(work, parts))
    with ThreadPoolExecutor(min(CORES, len(parts))) as pool:
        return list(pool.map(work, parts))


def threads_each(items: Sized) -> int:
    """Return the threads of each of some items, which ``on_all_cores`` works on."""
    return max(1, CORES // max(1, len(items)))


def single_products() -> Any:
    """Return a context in which each product of NumPy's takes one thread.

    A product by several threads waits for the slowest of them without giving up its processor: beside other
    work, SmolLM2's calibration takes 217 s of processor time with such products, 120 s with single ones.
    """
    return _libraries().limit(limits=1, user_api="blas")


@functools.cache
def _libraries() -> ThreadpoolController:
    from threadpoolctl import ThreadpoolController  # which only calibrations need

    return ThreadpoolController()
