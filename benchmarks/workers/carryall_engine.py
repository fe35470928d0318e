"""Measure carryall's engine: continuous and static batching, latency next to a long prompt, and overhead.

The model is ``PATH`` or ``PATH,provider=NAME,max_step_slowdown=NUMBER,max_slots=NUMBER,OPTION=TEXT`` with
options of the provider. ``max_step_slowdown=inf`` runs prompts first, as engines without a limit of the step
time do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from traces import Ask, Served, Trace
from worker import serve

import carryall
from carryall import SamplingParams
from carryall.providers.base import RunnerConfig
from carryall.runtime.engine.config import EngineConfig
from carryall.runtime.engine.engine import Engine
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.models.loading import load_model

LONG_PROMPT = 2000
CONTEXT = 4096


@dataclass(frozen=True)
class Latency:
    """Inter-token latencies of running streams in milliseconds, without and with a long prompt."""

    undisturbed_p95: float
    disturbed_p95: float
    disturbed_max: float
    first_token_s: float  # seconds to the long prompt's first token
    generated: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Overhead:
    """Milliseconds of one decode step in the model and outside of it, and the fraction outside."""

    model_ms: float
    rest_ms: float
    share: float
    generated: int = 0
    seconds: float = 0.0


@dataclass
class Bench:
    """One engine, and a counter for the ids of its requests."""

    engine: Engine
    names: int = 0
    made: list[Request] = field(default_factory=list)

    def add(self, ask: Ask, *, streamed: bool = True) -> Request:
        """Queue a request; those of ``LLM.generate`` are not streamed."""
        params = SamplingParams(temperature=0.0, max_tokens=ask.new_tokens, ignore_eos=True)
        self.names += 1
        request = Request(str(self.names), ask.tokens.tolist(), params, streamed=streamed)
        self.engine.add(request)
        return request

    def drain(self) -> None:
        """Run all queued requests to their end."""
        while self.engine.has_work:
            self.engine.step()

    def served(self, trace: Trace) -> Served:
        """Run a trace and return its time."""
        self.engine.clear_prefix_cache()
        asks = trace.asks()
        groups = trace.static_batches() if trace.batch else [asks]
        if trace.kind == "shared":
            self.add(asks[0])
            self.drain()
            groups = [asks[1:]]
        start = time.perf_counter()
        for group in groups:
            for ask in group:
                self.add(ask, streamed=False)
            self.drain()
        seconds = time.perf_counter() - start
        asked = asks[1:] if trace.kind == "shared" else asks
        return Served(seconds, sum(ask.new_tokens for ask in asked))

    def latency(self, trace: Trace) -> Latency:
        """Measure the latency of decoding streams before and while a long prompt runs."""
        self.engine.clear_prefix_cache()
        rng = np.random.default_rng(trace.seed)
        streams = [self.add(Ask(rng.integers(2, 7000, 64), 3000)) for _ in range(trace.requests)]
        for _ in range(8):
            self.engine.step()
        quiet = self._gaps(60)
        start = time.perf_counter()
        long = self.add(Ask(rng.integers(2, 7000, LONG_PROMPT), 1))
        busy: list[float] = []
        while not long.finished:
            busy += self._gaps(1)
        first = time.perf_counter() - start
        for request in streams:
            self.engine.cancel(request.request_id)
        p95 = [float(np.percentile(gaps, 95)) * 1e3 for gaps in (quiet, busy)]
        return Latency(p95[0], p95[1], max(busy) * 1e3, first)

    def _gaps(self, steps: int) -> list[float]:
        """Return seconds between tokens of the running streams: each step yields a token for every stream."""
        gaps = []
        for _ in range(steps):
            start = time.perf_counter()
            self.engine.step()
            gaps.append(time.perf_counter() - start)
        return gaps

    def overhead(self, trace: Trace) -> Overhead:
        """Measure the part of a decode step outside of the model."""
        self.engine.clear_prefix_cache()
        rng = np.random.default_rng(trace.seed)
        requests = [self.add(Ask(rng.integers(2, 7000, 32), 3000)) for _ in range(trace.requests)]
        while any(not request.output_token_ids for request in requests):
            self.engine.step()
        inside = 0.0
        forward = self.engine.runner.forward

        def timed(rows):  # noqa: ANN001, ANN202
            nonlocal inside
            start = time.perf_counter()
            result = forward(rows)
            inside += time.perf_counter() - start
            return result

        self.engine.runner.forward = timed  # type: ignore[method-assign]
        steps = 40
        whole = sum(self._gaps(steps))
        self.engine.runner.forward = forward  # type: ignore[method-assign]
        for request in requests:
            self.engine.cancel(request.request_id)
        return Overhead(inside / steps * 1e3, (whole - inside) / steps * 1e3, (whole - inside) / whole)


def load(argument: str) -> tuple[str, Callable[[Trace], object]]:
    """Load the model and return the engine's name and its measuring function."""
    path, *settings = argument.split(",")
    options = dict(setting.split("=", 1) for setting in settings)
    provider = options.pop("provider", "cpu")
    config = EngineConfig(
        max_step_slowdown=float(options.pop("max_step_slowdown", EngineConfig().max_step_slowdown))
    )
    slots = int(options.pop("max_slots", RunnerConfig().max_slots))
    model = load_model(
        path,
        provider=provider,
        max_slots=slots,
        context_length=CONTEXT,
        provider_options=_values(options),
    )
    bench = Bench(Engine(model.runner, config))
    kinds = {"latency": bench.latency, "overhead": bench.overhead}
    name = " ".join([f"carryall {carryall.__version__}", provider, *settings])
    return name, lambda trace: kinds.get(trace.kind, bench.served)(trace)


def _values(options: dict[str, str]) -> dict[str, object]:
    """Parse option values: numbers, ``true`` and ``false`` as in JSON, everything else as text."""
    values: dict[str, object] = {}
    for name, text in options.items():
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return values


serve(load, Trace)
