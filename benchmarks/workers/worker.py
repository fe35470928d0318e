"""The loop of every benchmark worker: one JSON request per line on stdin, one JSON answer per line on stdout.

A worker runs in its own environment, because the engines' wheels overwrite each other. It loads its model
once and then measures on request, so that the driver can alternate engines by round. This file imports only
the standard library and numpy.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TextIO, TypeVar

import numpy as np

W = TypeVar("W")


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
    """Seconds until the last row's first token, and from there to the last row's last token."""

    prefill_s: float
    decode_s: float
    generated: int  # tokens over all rows; the driver refuses a wrong number


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
    """Return the peak resident memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def _take_stdout() -> TextIO:
    """Return the stdout stream for replies, and redirect prints of libraries to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _send(stream: TextIO, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
