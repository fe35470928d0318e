"""Traces and metrics as a collector receives them."""

from __future__ import annotations

import ast
import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from grpc_serving import read, repository, serving
from http_serving import http_serving
from null_llm import null_llm
from otlp_collector import Collected, attributes, collector

from carryall.errors import MissingExtraError, ProviderRuntimeError, UsageError
from carryall.proto import generation_pb2 as pb
from carryall.runtime.service.core.config import ServerConfig
from carryall.runtime.service.telemetry import tracing
from carryall.runtime.service.telemetry.tracing import Tracing

CANARY = "xyzzy-canary"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1"}


def histogram(collected: Collected, name: str) -> Any:
    """The only data point of a histogram."""
    (point,) = collected.metrics[name].histogram.data_points
    return point


def test_a_collector_receives_spans_and_durations() -> None:
    async def scenario(collected: Collected) -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            telemetry = Tracing.to(collected.endpoint)
            served.models.observers.add(telemetry)
            answer = await served.client.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": CANARY}], "max_tokens": 4, "ignore_eos": True,
                      "temperature": 0.5, "n": 2, "stop": ["never"]},
                headers=PARENT,
            )  # fmt: skip
            usage = answer.json()["usage"]
            await asyncio.to_thread(telemetry.close)
            (span,) = collected.spans
            found = attributes(span.attributes)
            assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("chat toy", TRACE, SPAN)
            assert span.kind == span.SPAN_KIND_SERVER
            assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
            assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 8
            assert found["gen_ai.response.finish_reasons"] == ["length", "length"]
            assert f"chatcmpl-{found['gen_ai.response.id']}" == answer.json()["id"]
            assert (found["gen_ai.request.temperature"], found["gen_ai.request.choice.count"]) == (0.5, 2)
            assert found["gen_ai.request.stop_sequences"] == ["never"]
            assert collected.resources[0]["service.name"] == "carryall"
            assert CANARY not in str(collected.spans)
            seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
            whole = histogram(collected, "gen_ai.server.request.duration")
            first = histogram(collected, "gen_ai.server.time_to_first_token")
            between = histogram(collected, "gen_ai.server.time_per_output_token")
            assert whole.count == first.count == between.count == 1
            assert first.sum <= whole.sum == pytest.approx(seconds, abs=0.05)
            assert first.sum + 7 * between.sum == pytest.approx(whole.sum, abs=0.05)
            assert attributes(whole.attributes)["gen_ai.operation.name"] == "chat"
            assert list(first.explicit_bounds)[:3] == [0.001, 0.005, 0.01]

    with collector() as collected:
        asyncio.run(scenario(collected))


def test_errors_have_a_type_and_no_text() -> None:
    def fail(rows: object) -> None:
        raise ProviderRuntimeError(CANARY)

    async def scenario(collected: Collected) -> None:
        async with null_llm(before_forward=fail) as llm, serving(llm, models := repository(llm)) as served:
            telemetry = Tracing.to(collected.endpoint)
            models.observers.add(telemetry)
            call = served.stub.Generate(pb.GenerateRequest(text="x"), metadata=tuple(PARENT.items()))
            with pytest.raises(Exception, match=CANARY):
                await read(call)
            await asyncio.to_thread(telemetry.close)
            (span,) = collected.spans
            assert (span.name, span.trace_id.hex()) == ("text_completion toy", TRACE)
            assert attributes(span.attributes)["error.type"] == "ProviderRuntimeError"
            assert span.status.code == span.status.STATUS_CODE_ERROR
            point = histogram(collected, "gen_ai.server.request.duration")
            assert attributes(point.attributes)["error.type"] == "ProviderRuntimeError"
            assert "gen_ai.server.time_to_first_token" not in collected.metrics
            assert CANARY not in str(collected.spans)

    with collector() as collected:
        asyncio.run(scenario(collected))


def test_nothing_is_imported_unless_configured() -> None:
    """Every import of OpenTelemetry is inside a function that only a configured service calls."""
    root = Path(tracing.__file__).parents[3]
    for path in root.rglob("*.py"):
        top = ast.parse(path.read_text(encoding="utf-8")).body
        names = [ast.unparse(node) for node in top if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [name for name in names if "opentelemetry" in name], path


def test_missing_libraries_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(MissingExtraError, match=r"carryall\[otel\]"):
        Tracing.to("http://127.0.0.1:1")


@pytest.mark.parametrize(
    "endpoint",
    ["", "abc", "127.0.0.1:4317", "grpc://a:1", "http://a", "http://a:b", "http://\udcff:1", "http://a b:1"],
)
def test_an_endpoint_is_a_url_with_a_port(endpoint: str) -> None:
    with pytest.raises(UsageError, match=r"^otel_endpoint is '.*'; it must be http://HOST:PORT or https://"):
        ServerConfig(otel_endpoint=endpoint)
    for good in ("http://127.0.0.1:4317", "https://[::1]:4317/", "http://collector.example:4317"):
        assert ServerConfig(otel_endpoint=good).otel_endpoint == good
