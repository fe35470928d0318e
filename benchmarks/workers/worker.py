"""The loop every benchmark worker runs: one JSON request a line in, one JSON answer a line out.

A worker lives in its own environment (the peers' wheels overwrite each other), loads its model once, and then
measures on command, so that the driver can interleave engines round by round. Only the standard library and
numpy may be imported here.
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
        """Token ids [batch, prompt_tokens], never a special token."""
        return np.random.default_rng(self.seed).integers(2, 7000, (self.batch, self.prompt_tokens))


@dataclass(frozen=True)
class Timing:
    """Seconds until the last row's first token, and from there to the last row's last token."""

    prefill_s: float
    decode_s: float
    generated: int  # tokens over all rows, so that a short answer cannot pass for a fast one


def serve(load: Callable[[str], tuple[str, Callable[[W], Any]]], work: Callable[..., W] = Work) -> None:
    """Load the model named in argv, announce it, and answer measuring requests until stdin closes.

    Args:
        load: takes the model path; gives the engine's name with version, and the measuring function, whose
            result is a dataclass.
        work: makes the measuring function's argument of a request's fields.
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
    """Largest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def _take_stdout() -> TextIO:
    """Keep stdout for replies; anything a library prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _send(stream: TextIO, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
