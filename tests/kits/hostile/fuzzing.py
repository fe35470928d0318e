"""Fuzzing: a few examples in every run, minutes of them in the slow tests, and what was found is kept.

A finding goes as a small file into ``tests/corpora/KIND``; every run tries these files first. The slow tests
take ``CARRYALL_FUZZ_SECONDS`` (600) together, divided by ``SLOW_TESTS``.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CORPORA = Path(__file__).resolve().parents[2] / "corpora"
SLOW_TESTS = 14
_PIECE = 100  # examples between two looks at the clock


def seeds(kind: str) -> list[Path]:
    """The kept files of a kind, never none."""
    found = sorted(path for path in (CORPORA / kind).iterdir() if path.is_file())
    assert found, kind
    return found


def _end() -> float:
    return time.monotonic() + float(os.environ.get("CARRYALL_FUZZ_SECONDS", "600")) / SLOW_TESTS


def new_seeds() -> Iterator[int]:
    """Seeds that no earlier run had, for a share of the slow tests' time: a case takes over 1 ms."""
    end = _end()
    for seed in itertools.count(time.time_ns() // 1_000_000):
        if time.monotonic() > end:
            return
        yield seed


def fuzz(strategy: st.SearchStrategy[Any], check: Callable[[Any], None], examples: int | None) -> None:
    """Try ``examples`` of a strategy, always the same; or others, for a share of the slow tests' time."""
    end = _end()

    @settings(
        max_examples=examples or _PIECE,
        deadline=None,
        derandomize=examples is not None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(value: Any) -> None:
        check(value)

    run()
    while examples is None and time.monotonic() < end:
        run()


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bytes with a few places changed, cut out, doubled or moved, or cut at the end."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        if not content:
            break
        start = draw(st.integers(0, len(content) - 1))
        end = min(len(content), start + draw(st.integers(1, 16)))
        way = draw(st.sampled_from(["change", "flip", "cut", "double", "end", "insert"]))
        if way == "change":
            content[start:end] = draw(st.binary(min_size=end - start, max_size=end - start))
        elif way == "flip":
            content[start] ^= 1 << draw(st.integers(0, 7))
        elif way == "cut":
            del content[start:end]
        elif way == "double":
            content[start:start] = content[start:end]
        elif way == "insert":
            content[start:start] = draw(st.binary(min_size=1, max_size=8))
        else:
            del content[start:]
    return bytes(content)
