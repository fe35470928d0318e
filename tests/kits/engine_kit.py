"""Engines on the toy model and requests for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from carryall.errors import ProviderRuntimeError
from carryall.providers.base import Row, RunnerConfig
from carryall.providers.targets.null import NullOptions, NullRunner
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.engine.requests.pooled_states import Pooling
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.speculation.proposer import Proposer
from carryall.runtime.types.sampling_params import SamplingParams

VOCAB = 256
TRIM_STEP = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def make_runner(
    *,
    max_slots: int = 4,
    context_length: int = 256,
    kv_bytes_per_token: int = 1,
    window: int = 0,
    trim_step: int = TRIM_STEP,
    top_logits: int = 0,
) -> NullRunner:
    """Return a toy model, by default with one byte of KV per token."""
    config = RunnerConfig(max_slots=max_slots, context_length=context_length)
    options = NullOptions(
        vocab_size=VOCAB,
        kv_bytes_per_token=kv_bytes_per_token,
        embedding_size=4,
        sliding_window=window,
        trim_step=trim_step * (window > 0),
        top_logits=top_logits,
    )
    return NullRunner(config, options)


def make_engine(
    *,
    max_slots: int = 4,
    context_length: int = 256,
    max_step_tokens: int = 32,
    kv_tokens: int | None = None,
    max_queue: int | None = None,
    prefix_cache: bool = False,
    proposer: Proposer | None = None,
    adaptive: bool = False,
    kv_eviction_tokens: int | None = None,
    window: int = 0,
    trim_step: int = TRIM_STEP,
    trims_always: bool = False,
    swap_tokens: int = 0,
    top_logits: int = 0,
) -> tuple[Engine, NullRunner]:
    """Return an engine on a toy model, by default with non-adaptive speculation."""
    runner = make_runner(
        max_slots=max_slots,
        context_length=context_length,
        window=window,
        trim_step=trim_step,
        top_logits=top_logits,
    )
    config = EngineConfig(
        max_step_tokens=max_step_tokens,
        kv_bytes=kv_tokens,
        max_queue=max_queue,
        prefix_cache=prefix_cache,
        adaptive_speculation=adaptive,
        kv_eviction_tokens=kv_eviction_tokens,
        trim_windows="always" if trims_always else "when_short",
        swap_bytes=8 * swap_tokens,
    )
    return Engine(runner, config, proposer), runner


def make_request(
    name: str,
    prompt: Sequence[int] | int = 5,
    params: SamplingParams = GREEDY,
    *,
    end_token_ids: Collection[int] = (),
    priority: int = 0,
    cache_salt: str | None = None,
    streamed: bool = True,
    first_sample: str | None = None,
) -> Request:
    """Return a request; an integer prompt is a number of tokens that depend on the name."""
    if isinstance(prompt, int):
        seed = sum(name.encode())
        tokens = np.random.default_rng(seed).integers(0, VOCAB, prompt).tolist()
    else:
        tokens = list(prompt)
    return Request(
        name,
        tokens,
        params,
        end_token_ids=end_token_ids,
        priority=priority,
        cache_salt=cache_salt,
        streamed=streamed,
        first_sample=first_sample,
    )


def run(engine: Engine, requests: Iterable[Request] = (), *, most_steps: int = 10_000) -> list[list[int]]:
    """Add requests, run all steps, and return the tokens of each request."""
    requests = list(requests)
    for request in requests:
        engine.add(request)
    for _ in range(most_steps):
        if not engine.has_work:
            return [request.output_token_ids for request in requests]
        engine.step()
        engine.check_integrity()
    raise AssertionError(f"work is left after {most_steps} steps: {engine.stats()}")


def alone(request: Request) -> list[int]:
    """Return the tokens of the same request in a separate engine, with its prompt in one piece."""
    engine, _ = make_engine(max_slots=1, max_step_tokens=256)
    copy = Request(
        request.request_id, request.prompt_token_ids, request.params, end_token_ids=request.end_token_ids
    )
    return run(engine, [copy])[0]


def vector(tokens: Sequence[int], pooling: Pooling) -> npt.NDArray[np.float32]:
    """Return the toy model's embedding of a text from a separate run."""
    runner = make_runner(max_slots=1)
    states = np.empty((len(tokens), runner.info.embedding_size), np.float32)
    runner.forward([Row(0, np.array(tokens, np.int64), 0, 0, last_hidden_states=states)])
    pooled: npt.NDArray[np.float32] = states[-1] if pooling == "last" else states.mean(axis=0)
    return pooled


class FailWhen:
    """A fault that fails every run with a token of ``tokens``."""

    def __init__(self, tokens: Collection[int]) -> None:
        self.tokens = set(tokens)
        self.hits = 0

    def __call__(self, rows: Sequence[Row]) -> None:
        if any(self.tokens & set(row.tokens.tolist()) for row in rows):
            self.hits += 1
            raise ProviderRuntimeError("device fell over")


class EvenTokens:
    """A grammar that allows even tokens."""

    finished = False
    error = ""
    lowers = True

    def prepare(self) -> None:
        """Nothing to prepare."""

    def ready(self, seconds: float) -> bool:
        return True

    def observe(self, token: int) -> None:
        assert token % 2 == 0

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        logits[1::2] = -np.inf

    def forced_tokens(self) -> list[int]:
        return []

    def valid_prefix(self, tokens: Any) -> int:
        return int(np.argmax([*(np.asarray(tokens) % 2 == 1), True]))

    def copy(self) -> EvenTokens:
        return self
