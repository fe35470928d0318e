"""OpenTelemetry traces and metrics by the conventions for generative AI.

See https://opentelemetry.io/docs/specs/semconv/gen-ai/ (spans, and the metrics ``gen_ai.server.*``). Spans
have no text of prompts and answers.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ....errors import MissingExtraError
from ...types.outputs import RequestMetrics
from ..core.chat import Conversation
from ..core.messages import Delta, GenerationRequest
from ..core.request_context import TRACE

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

_PROVIDER = "carryall"
# The bucket bounds that the conventions recommend, in seconds.
_DURATIONS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "gen_ai.server.request.duration": ("Time from arrival to the last token or the error.", _DURATIONS),
    "gen_ai.server.time_to_first_token": ("Time from arrival to the first token.", _FIRST),
    "gen_ai.server.time_per_output_token": ("Time per token after the first one.", _BETWEEN),
}
_OPTIONS = ("temperature", "top_p", "top_k", "max_tokens", "frequency_penalty", "presence_penalty", "seed")


class Tracing:
    """Makes a span and durations of each request.

    Args:
        traces: makes the spans.
        meters: collects the durations.
    """

    def __init__(self, traces: TracerProvider, meters: MeterProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        version = importlib.metadata.version("carryall")
        self._providers = traces, meters
        self.tracer, meter = traces.get_tracer("carryall", version), meters.get_meter("carryall", version)
        self.propagator = TraceContextTextMapPropagator()
        self.histograms = {
            name: meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=bounds)
            for name, (text, bounds) in _HISTOGRAMS.items()
        }

    @classmethod
    def to(cls, endpoint: str) -> Tracing:
        """Return an instance that exports to an OTLP collector over gRPC.

        OpenTelemetry's own variables set the rest, such as ``OTEL_RESOURCE_ATTRIBUTES`` and
        ``OTEL_METRIC_EXPORT_INTERVAL``.

        Args:
            endpoint: such as ``http://127.0.0.1:4317``; ``https`` turns on encryption.

        Raises:
            MissingExtraError: the libraries are not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise MissingExtraError("--otel-endpoint", error.name or "opentelemetry", "otel") from error
        version = importlib.metadata.version("carryall")
        resource = Resource.create({"service.name": "carryall", "service.version": version})
        traces = TracerProvider(resource=resource, shutdown_on_exit=False)
        traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint))
        return cls(traces, MeterProvider([reader], resource=resource, shutdown_on_exit=False))

    def begin(self, model: str, request: GenerationRequest) -> _Request:
        return _Request(self, model, request)

    def close(self) -> None:
        """Export what is left, and stop."""
        for provider in self._providers:
            provider.shutdown()


class _Request:
    """Follows one request; see ``RequestObserver``."""

    def __init__(self, tracing: Tracing, model: str, request: GenerationRequest) -> None:
        from opentelemetry.trace import SpanKind

        operation = "chat" if isinstance(request.prompt, Conversation) else "text_completion"
        self._tracing, self._start = tracing, time.monotonic()
        self._first = self._last = 0.0
        self._tokens = 0
        self._reasons: dict[int, str] = {}
        self._times: RequestMetrics | None = None
        self._labels: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
        }
        self._span = tracing.tracer.start_span(
            f"{operation} {model}",
            context=tracing.propagator.extract(TRACE.get()),
            kind=SpanKind.SERVER,
            attributes={**self._labels, **_options(request)},
        )

    def delta(self, delta: Delta, metrics: RequestMetrics | None) -> None:
        if delta.token_ids:
            self._last = time.monotonic()
            self._first = self._first or self._last
            self._tokens += len(delta.token_ids)
        self._times = metrics or self._times
        if delta.finish_reason is not None:
            self._reasons[delta.index] = delta.finish_reason
        if delta.usage is not None:
            self._span.set_attributes(
                {
                    "gen_ai.response.id": delta.request_id,
                    "gen_ai.usage.input_tokens": delta.usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": delta.usage.completion_tokens,
                    "gen_ai.usage.cache_read.input_tokens": delta.usage.cached_tokens,
                    "gen_ai.response.finish_reasons": [self._reasons[i] for i in sorted(self._reasons)],
                }
            )

    def ended(self, error: BaseException | None) -> None:
        labels, histograms, now = self._labels, self._tracing.histograms, time.monotonic()
        if error is not None:
            from opentelemetry.trace import StatusCode

            labels = {**labels, "error.type": type(error).__name__}
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(StatusCode.ERROR)  # no text: it may quote the request
        histograms["gen_ai.server.request.duration"].record(now - self._start, labels)
        if self._first:
            histograms["gen_ai.server.time_to_first_token"].record(self._first - self._start, labels)
        if self._tokens > 1:
            between = (self._last - self._first) / (self._tokens - 1)
            histograms["gen_ai.server.time_per_output_token"].record(between, labels)
        times = self._times
        if times is not None and times.first_scheduled is not None:
            self._span.set_attribute("carryall.queue_seconds", times.first_scheduled - times.arrival)
        self._span.end()


def _options(request: GenerationRequest) -> dict[str, Any]:
    """Return the sampling options by their names in the conventions."""
    params = request.params
    given = {f"gen_ai.request.{name}": getattr(params, name) for name in _OPTIONS}
    given |= {"gen_ai.request.choice.count": params.n, "gen_ai.request.stop_sequences": params.stop or None}
    return {name: value for name, value in given.items() if value is not None}
