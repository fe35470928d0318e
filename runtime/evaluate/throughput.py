"""Measure the speed of an engine: prefill, first token and decode, on random prompts."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np

from ...errors import ProviderRuntimeError, UsageError
from ...records import dataclass
from ..engine.engine import Engine
from ..engine.requests.request import Request
from ..types.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """``batch`` requests that arrive together, each with its own random prompt."""

    batch: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRun:
    """One run of a workload.

    Attributes:
        prefill: prompt tokens per second until every request has its first token.
        decode: generated tokens per second while all requests generate.
        first_token: median over the batch of the seconds until the first token.
    """

    prefill: float
    decode: float
    first_token: float


def check_fits(engine: Engine, works: Sequence[Workload]) -> None:
    """Check that workloads fit the context.

    Raises:
        UsageError: one does not.
    """
    for work in works:
        total = work.prompt_tokens + work.new_tokens
        if total > engine.max_length:
            raise UsageError(f"{total} tokens per request exceed the context of {engine.max_length}")


def measure(engine: Engine, work: Workload, seed: int) -> WorkloadRun:
    """Run a workload once.

    Raises:
        UsageError: it does not fit the context, or requests ended before all had begun.
        ProviderRuntimeError: a request failed.
    """
    check_fits(engine, [work])
    requests = _requests(work, engine.info.vocab_size, seed)
    start = time.perf_counter()
    for request in requests:
        engine.add(request)
    while not all(request.output_token_ids or request.finished for request in requests):
        engine.step()
    prefilled = time.perf_counter()
    steps = 0
    while not any(request.finished for request in requests):
        engine.step()
        steps += 1
    ended = time.perf_counter()
    while engine.has_work:
        engine.step()
    _check(requests, steps)
    waits = [
        request.metrics.first_token - request.metrics.arrival
        for request in requests
        if request.metrics.first_token
    ]
    return WorkloadRun(
        prefill=work.batch * work.prompt_tokens / (prefilled - start),
        decode=work.batch * steps / (ended - prefilled),
        first_token=statistics.median(waits),
    )


def interleaved(engines: Mapping[str, Engine], work: Workload, rounds: int) -> dict[str, list[WorkloadRun]]:
    """Run a workload on several engines in turn, so that other load affects all equally.

    Each round starts with the next engine. A warm-up round is not returned.
    """
    names = list(engines)
    samples: dict[str, list[WorkloadRun]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            gc.collect()
            samples[name].append(measure(engines[name], work, seed=number))
    return {name: found[1:] for name, found in samples.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _requests(work: Workload, vocab_size: int, seed: int) -> list[Request]:
    params = SamplingParams(max_tokens=work.new_tokens, temperature=0.0, ignore_eos=True)
    prompts = np.random.default_rng(seed).integers(0, vocab_size, (work.batch, work.prompt_tokens))
    return [Request(f"bench-{seed}-{row}", prompt.tolist(), params) for row, prompt in enumerate(prompts)]


def _check(requests: Sequence[Request], steps: int) -> None:
    error = next((request.error for request in requests if request.error), None)
    if error is not None:
        raise ProviderRuntimeError(error)
    if steps == 0:
        raise UsageError(
            "some requests ended before others had a first token; raise --new-tokens or lower --batch"
        )
