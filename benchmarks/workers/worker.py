"""The loop of every benchmark worker: one JSON request per line on stdin, one JSON answer per line on stdout.

A worker runs in its own environment, because the engines' wheels overwrite each other. It loads its model
once and then measures on request, so that the driver can alternate engines by round. This file imports only
the standard library and numpy.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TextIO, TypeVar

import numpy as np

W = TypeVar("W")

CPU_TIME = "BENCHMARK_CPU_TIME"  # the variable that makes workers count processor seconds of their process
clock = time.process_time if os.environ.get(CPU_TIME) else time.perf_counter


@dataclass(frozen=True)
class Work:
    """One measurement: ``batch`` prompts of random tokens, each continued greedily."""

    prompt_tokens: int
    new_tokens: int
    batch: int = 1
    seed: int = 0

    def prompts(self) -> np.ndarray:
        """Return int64 token ids [batch, prompt_tokens] without special tokens."""
        return np.random.default_rng(self.seed).integers(2, 7000, (self.batch, self.prompt_tokens))


@dataclass(frozen=True)
class Timing:
    """Seconds until all rows have their first token, and the median of those between later tokens."""

    prefill_s: float
    step_s: float
    generated: int  # tokens over all rows; the driver refuses a wrong number

    @classmethod
    def of(cls, start: float, moments: Sequence[float], generated: int) -> Self:
        """Return the timing of a run.

        The median of intervals, not the difference of a long and a short run: that would have the noise of
        two prompts.

        Args:
            start: when the run began, in seconds.
            moments: when all rows had their first token, their second, and so on; at least one.
            generated: tokens over all rows.
        """
        intervals = [later - earlier for earlier, later in itertools.pairwise(moments)]
        return cls(moments[0] - start, statistics.median(intervals) if intervals else 0.0, generated)


def serve(load: Callable[[str], tuple[str, Callable[[W], Any]]], work: Callable[..., W] = Work) -> None:
    """Load the model of argv, send a line with its name, and answer requests until stdin is closed.

    Args:
        load: takes the model path and returns the engine's name with version, and the measuring function,
            whose result is a dataclass.
        work: creates the measuring function's argument from a request's fields.
    """
    replies = _take_stdout()
    started = time.perf_counter()
    engine, measure = load(sys.argv[1])
    ready = {"engine": engine, "load_s": time.perf_counter() - started, "pid": os.getpid()}
    _send(replies, ready)
    for line in sys.stdin:
        timing = measure(work(**json.loads(line)))
        _send(replies, asdict(timing) | {"peak_rss_mb": peak_rss_mb()})


def peak_rss_mb() -> float:
    """Return the peak resident memory of this process in MB; ``getrusage`` counts that of its parent too."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024 / 1e6


def _take_stdout() -> TextIO:
    """Return the stdout stream for replies, and redirect prints of libraries to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _send(stream: TextIO, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
