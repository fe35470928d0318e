"""What was measured to be the fastest here; kept in the cache, under a key of the machine and the kernels."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...records import dataclass
from ...storage.root import cache_root, unusable
from ...storage.writing import write_whole
from ..native.compiler import sources_key
from ..native.library import KernelLibrary, find_library, kernel_library, load
from . import machine


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was measured on this machine.

    Args:
        isa: the fastest instruction set of the kernels.
        threads: the fastest number of threads.
        isas: instruction set -> how many times as fast as the default it is, for 1 row and for many.
        thread_counts: the same of numbers of threads.
    """

    isa: str
    threads: int
    isas: Mapping[str, Sequence[float]]
    thread_counts: Mapping[int, Sequence[float]]


def stored_tuning() -> Tuning | None:
    """Return what was measured on this machine with these kernels, None if nothing was."""
    try:
        content = json.loads(_path().read_text(encoding="utf-8"))
        counts = {int(count): _gains(gains) for count, gains in content["thread_counts"].items()}
        isas = {isa: _gains(gains) for isa, gains in content["isas"].items()}
        found = Tuning(content["isa"], content["threads"], isas, counts)
        return found if _is_possible(found) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # nothing was measured, or the file is damaged: the defaults


def _gains(found: Sequence[float]) -> list[float]:
    gains = list(map(float, found))
    if not all(map(math.isfinite, gains)):
        raise ValueError(f"a gain is not finite: {gains}")
    return gains


def _is_possible(found: Tuning) -> bool:
    most = max(hardware_threads(), machine.usable_cores())
    counted = type(found.threads) is int and 1 <= found.threads <= most
    return counted and isinstance(found.isa, str) and found.isa.isascii() and found.isa.isprintable()


def store_tuning(tuning: Tuning) -> None:
    """Keep a result.

    Raises:
        UsageError: the cache folder cannot be used.
    """
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(dataclasses.asdict(tuning)))
    except OSError as error:
        raise unusable(error) from error


def tuned_kernels() -> KernelLibrary:
    """Return the facts of the library of CPU kernels, with the instruction set that was measured.

    Raises:
        ProviderUnavailableError: see ``kernel_library``.
    """
    path, tuned = find_library(), stored_tuning()
    if path is not None and tuned is not None:
        load(path).carryall_prefer_isa(tuned.isa.encode())
    return kernel_library()


def hardware_threads() -> int:
    """Return the number of hardware threads that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _path() -> Path:
    key = repr((machine.processor(), machine.usable_cores(), hardware_threads(), sources_key()))
    return cache_root() / "tuning" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
