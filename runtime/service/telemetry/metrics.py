"""Prometheus metrics with vLLM's names and meanings, so that its dashboards and routers work.

See https://docs.vllm.ai/en/latest/usage/metrics.html and the model server protocol of the Gateway API
inference extension (docs/proposals/003-model-server-protocol). Metrics that vLLM does not have are named
``carryall:...``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from ...engine.stats import EngineStats
from ...types.outputs import RequestMetrics
from ..core.messages import Delta, GenerationRequest
from ..core.repository import ModelRepository

_LABELS = ("model_name", "engine")
_ENGINE = "0"  # each model has one engine
# The bucket bounds are vLLM's, so that quantiles are comparable.
_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LONG = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_HISTOGRAMS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "first_token": (
        "vllm:time_to_first_token_seconds",
        "Seconds from arrival to the first token.",
        _SECONDS,
    ),
    "between": ("vllm:inter_token_latency_seconds", "Seconds between tokens.", _BETWEEN),
    "per_token": (
        "vllm:request_time_per_output_token_seconds",
        "Mean seconds per output token of a request.",
        _BETWEEN,
    ),
    "latency": ("vllm:e2e_request_latency_seconds", "Seconds from arrival to the last token.", _LONG),
    "queued": ("vllm:request_queue_time_seconds", "Seconds in the queue.", _LONG),
    "prefill": ("vllm:request_prefill_time_seconds", "Seconds of prefill.", _LONG),
    "decode": (
        "vllm:request_decode_time_seconds",
        "Seconds from the first to the last token.",
        _LONG,
    ),
    "prompts": ("vllm:request_prompt_tokens", "Tokens per prompt.", _TOKENS),
    "outputs": ("vllm:request_generation_tokens", "Tokens per answer.", _TOKENS),
    "choices": ("vllm:request_params_n", "Continuations per prompt.", (1, 2, 5, 10, 20)),
    "limits": ("vllm:request_params_max_tokens", "max_tokens of requests.", _TOKENS),
}
_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "vllm:num_requests_running": ("Requests that hold a slot.", lambda stats: stats.running),
    "vllm:num_requests_waiting": ("Requests in the queue.", lambda stats: stats.waiting),
    "vllm:kv_cache_usage_perc": (
        "Share of the KV cache that running requests use, from 0 to 1.",
        lambda stats: (stats.kv_tokens - stats.idle_kv_tokens) / max(1, stats.kv_tokens_budget),
    ),
    "carryall:kv_cache_bytes": ("Memory of the KV cache in bytes.", lambda stats: stats.kv_bytes),
}
_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "vllm:prompt_tokens": ("Prompt tokens.", lambda stats: stats.prompt_tokens),
    "vllm:generation_tokens": ("Generated tokens.", lambda stats: stats.generated_tokens),
    "vllm:prompt_tokens_cached": (
        "Prompt tokens with cached KV.",
        lambda stats: stats.prefix_cached_tokens,
    ),
    "vllm:prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache.",
        lambda stats: stats.prompt_tokens,
    ),
    "vllm:prefix_cache_hits": (
        "Prompt tokens found in the prefix cache.",
        lambda stats: stats.prefix_cached_tokens,
    ),
    "vllm:num_preemptions": ("Preemptions of running requests.", lambda stats: stats.preemptions),
    "vllm:spec_decode_num_draft_tokens": ("Draft tokens proposed.", lambda stats: stats.proposed_tokens),
    "vllm:spec_decode_num_accepted_tokens": (
        "Draft tokens accepted.",
        lambda stats: stats.accepted_tokens,
    ),
    "carryall:prefills_remote": (
        "Prompts that the prefill server computed in time.",
        lambda stats: stats.prefills_remote,
    ),
    "carryall:prefills_late": (
        "Prompts that it did not compute in time.",
        lambda stats: stats.prefills_late,
    ),
    "carryall:prefills_failed": (
        "Prompts that it refused, or that did not reach it.",
        lambda stats: stats.prefills_failed,
    ),
    "carryall:prefills_foreign": (
        "Prompts that it refused because it serves another model.",
        lambda stats: stats.prefills_foreign,
    ),
    "carryall:prefills_skipped": (
        "Prompts that were not sent to it, since it was slower or had just failed.",
        lambda stats: stats.prefills_skipped,
    ),
    "carryall:steps": ("Forward steps.", lambda stats: stats.steps),
}


class Metrics:
    """Counters and durations of all requests of a repository.

    Args:
        models: the repository. Its requests are observed from now on; its engines are read at each scrape.
        further: collectors of further metrics.
    """

    def __init__(self, models: ModelRepository, further: Sequence[Collector] = ()) -> None:
        self._registry = CollectorRegistry()
        for collector in (_Engines(models), *further):
            self._registry.register(collector)
        ProcessCollector(registry=self._registry)

        self._histograms = {
            key: Histogram(name, text, _LABELS, registry=self._registry, buckets=buckets)
            for key, (name, text, buckets) in _HISTOGRAMS.items()
        }
        self._of: dict[str, dict[str, Histogram]] = {}
        self.ended = Counter(
            "vllm:request_success",
            "Finished requests, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        models.observers.add(self)

    def begin(self, model: str, request: GenerationRequest) -> _Request:
        return _Request(self, model, request)

    def of(self, model: str) -> dict[str, Histogram]:
        """Return the histograms of one model, looked up once: labels cost more than an observation."""
        if model not in self._of:
            self._of[model] = {key: one.labels(model, _ENGINE) for key, one in self._histograms.items()}
        return self._of[model]

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Request:
    """Follows one request; see ``RequestObserver``."""

    def __init__(self, metrics: Metrics, model: str, request: GenerationRequest) -> None:
        self._metrics, self._model, self._asked = metrics, model, request
        self._own = metrics.of(model)
        self._arrival = time.monotonic()
        self._before: float | None = None  # time of the latest token
        self._tokens = 0
        self._prompt_tokens = 0
        self._times: RequestMetrics | None = None
        self._reason: str | None = None

    def delta(self, delta: Delta, metrics: RequestMetrics | None) -> None:
        now = time.monotonic()
        if delta.token_ids:
            if self._before is None:
                self._own["first_token"].observe(now - self._arrival)
            else:
                mean = (now - self._before) / len(delta.token_ids)
                for _ in delta.token_ids:  # a delta may hold several tokens
                    self._own["between"].observe(mean)
            self._before = now
        self._tokens += len(delta.token_ids)
        self._prompt_tokens = delta.prompt_tokens
        self._times = metrics or self._times
        self._reason = delta.finish_reason or self._reason

    def ended(self, error: BaseException | None) -> None:
        counts = self._own
        # vLLM's reason for a client that disconnected.
        self._metrics.ended.labels(self._model, _ENGINE, self._reason or "abort").inc()
        counts["choices"].observe(self._asked.params.n)
        if self._asked.params.max_tokens is not None:
            counts["limits"].observe(self._asked.params.max_tokens)
        if self._before is None or self._reason is None:
            return
        counts["latency"].observe(time.monotonic() - self._arrival)
        counts["prompts"].observe(self._prompt_tokens)
        counts["outputs"].observe(self._tokens)
        times = self._times
        if times is None or times.first_scheduled is None or times.first_token is None:
            return
        counts["queued"].observe(times.first_scheduled - times.arrival)
        counts["prefill"].observe(times.first_token - times.first_scheduled)
        if times.finished is None:
            return
        decode = times.finished - times.first_token
        counts["decode"].observe(decode)
        if self._tokens > 1:
            counts["per_token"].observe(decode / (self._tokens - 1))


class _Engines(Collector):
    """Collects the counters and gauges of the engines."""

    def __init__(self, models: ModelRepository) -> None:
        self._models = models

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: engines are not loaded yet when this is registered."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        ready = [one for one in self._models.models() if one.kind == "llm" and one.state == "ready"]
        stats = {
            one.info.model if one.info else one.name: self._models.llm(one.name, one.version).stats()
            for one in ready
        }
        for name, (text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            for model, each in stats.items():
                gauge.add_metric((model, _ENGINE), read(each))
            yield gauge
        for name, (text, read) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            for model, each in stats.items():
                counter.add_metric((model, _ENGINE), read(each))
            yield counter
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Requests in the queue.", labels=(*_LABELS, "reason")
        )
        blocks = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Size of the KV cache, in blocks of one token.",
            labels=(*_LABELS, "block_size", "num_gpu_blocks", "enable_prefix_caching"),
        )
        for model, each in stats.items():
            waiting.add_metric((model, _ENGINE, "capacity"), each.waiting)
            waiting.add_metric((model, _ENGINE, "deferred"), 0)
            blocks.add_metric((model, _ENGINE, "1", str(each.kv_tokens_budget), "True"), 1)
        yield waiting
        yield blocks
        yield self._adapters()
        yield self._states()

    def _adapters(self) -> Metric:
        """Return vLLM's metric of the LoRA adapters in use, with one entry for each model that has any."""
        adapters = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters in use.",
            labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        )
        for entry in self._models.entries:
            llm = None if entry.model is None else entry.model.llm
            if llm is not None and llm.max_loras:
                running, waiting = llm.adapter_names()
                names = str(llm.max_loras), ",".join(waiting), ",".join(running)
                adapters.add_metric(names, time.time())
        if not adapters.samples:  # routers read the metric of every service
            adapters.add_metric(("0", "", ""), time.time())
        return adapters

    def _states(self) -> Metric:
        states = GaugeMetricFamily(
            "carryall:model_ready", "Whether a model serves requests.", labels=("model_name", "state")
        )
        for one in self._models.models():
            name = one.name if one.only else f"{one.name}:{one.version}"
            states.add_metric((name, one.state), float(one.state == "ready"))
        return states
