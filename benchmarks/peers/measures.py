"""Measure engines in turn: decoding by the intervals between tokens, prompts, traces, loading and memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import serving
from turns import Work, Worker

NEW_TOKENS = 64  # of a run whose intervals are the rate of decoding
_SETTLE_SECONDS = 0.5  # threads of the previous engine may still spin


@dataclass(frozen=True)
class Contestant:
    """An engine with its model.

    Args:
        name: as in the tables.
        python: the interpreter of its environment.
        model: argument of the worker.
        decode: worker of ``Work``.
        trace: worker of ``Trace``, None if the engine has no continuous batching or static batches.
        logits: engine of the worker ``logits.py``.
    """

    name: str
    python: Path
    model: str
    decode: str
    trace: str | None
    logits: str


@dataclass(frozen=True)
class Figure:
    """One measured value: ``unit`` is "tokens/s" or "%", or "s", "MB" or "nats", of which less is better."""

    measure: str
    engine: str
    unit: str
    value: float
    round: int = 0


@dataclass(frozen=True)
class Plan:
    """What is measured: (prompt tokens, batch) of decoding, lengths of prompts, requests of the traces."""

    decode: Sequence[tuple[int, int]] = ((256, 1), (1024, 1), (4096, 1), (256, 8), (256, 32))
    prompts: Sequence[int] = (256, 1024, 4096)
    requests: int = 48
    rounds: int = 3


QUICK = Plan(decode=((64, 1), (64, 4)), prompts=(128,), requests=6, rounds=2)


def decode_name(prompt: int, batch: int) -> str:
    """Return the measure of decoding after prompts of some tokens."""
    return f"decode, batch {batch}, {prompt} cached"


def prompt_name(tokens: int) -> str:
    """Return the measure of one prompt."""
    return f"prompt of {tokens}"


Keep = Callable[[Sequence[Figure], dict[str, str]], None]


def run(contestants: Sequence[Contestant], plan: Plan, keep: Keep) -> tuple[list[Figure], dict[str, str]]:
    """Measure speed and memory; return the figures and the engines' versions.

    Calls ``keep`` with the figures so far and the versions after each part.
    """
    figures: list[Figure] = []
    workers, versions = [], {}
    for one in contestants:
        try:
            worker = Worker(one.name, str(one.python), one.decode, one.model)
        except RuntimeError as error:  # such as a GGUF file of a family that the engine does not read
            if one is contestants[0]:
                raise
            versions[one.name] = f"does not load the model: {str(error).strip().splitlines()[-1]}"
            continue
        workers.append((one, worker))
        versions[one.name] = str(worker.ready["engine"])
    figures += [Figure("load", one.name, "s", float(worker.ready["load_s"])) for one, worker in workers]
    for part in decode_and_prompts([worker for _, worker in workers], plan):
        figures += part
        keep(figures, versions)
    figures += [Figure("peak memory", one.name, "MB", _memory(worker)) for one, worker in workers]
    keep(figures, versions)
    for _, worker in workers:
        worker.close()
    figures += _traces([one for one, _ in workers], plan)
    keep(figures, versions)
    return figures, versions


def decode_and_prompts(workers: Sequence[Worker], plan: Plan) -> Iterator[list[Figure]]:
    """Yield the rates of each round; the first round warms up and is not recorded."""
    works: list[tuple[str, Callable[[Worker, int], float]]] = [
        (decode_name(prompt, batch), _decode(prompt, batch)) for prompt, batch in plan.decode
    ]
    works += [(prompt_name(tokens), _prompt(tokens)) for tokens in plan.prompts]
    for number in range(-1, plan.rounds):
        first, rates = number % len(workers), []
        for name, measure in works:
            for worker in [*workers[first:], *workers[:first]]:
                time.sleep(_SETTLE_SECONDS)
                rate = measure(worker, 1000 + number)
                rates.append(Figure(name, worker.name, "tokens/s", rate, number))
        if number >= 0:
            yield rates
        print(f"round {number + 1} of {plan.rounds}", file=sys.stderr, flush=True)


def _decode(prompt: int, batch: int) -> Callable[[Worker, int], float]:
    def measure(worker: Worker, seed: int) -> float:
        return batch / float(worker.measure(Work(prompt, NEW_TOKENS, batch), seed)["step_s"])

    return measure


def _prompt(tokens: int) -> Callable[[Worker, int], float]:
    def measure(worker: Worker, seed: int) -> float:
        return tokens / float(worker.measure(Work(tokens, 1, 1), seed)["prefill_s"])

    return measure


def _memory(worker: Worker) -> float:
    return float(worker.measure(Work(16, 2, 1), seed=1)["peak_rss_mb"])


def _traces(contestants: Sequence[Contestant], plan: Plan) -> Iterator[Figure]:
    """Yield the rates of the mixed and the shared trace."""
    able = [one for one in contestants if one.trace is not None]
    workers = [Worker(one.name, str(one.python), str(one.trace), one.model) for one in able]
    wanted = ("mixed", "shared")
    works = {name: work for name, work in serving.measurements(plan.requests, 1.0).items() if name in wanted}
    for record in serving.run(workers, works, max(2, plan.rounds // 2)):
        rate = float(record["generated"]) / float(record["seconds"])
        yield Figure(f"{record['work']} trace", str(record["engine"]), "tokens/s", rate, int(record["round"]))
    for worker in workers:
        worker.close()
