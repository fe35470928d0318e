"""The client for threads, against a served engine."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from grpc_serving import INFO, serving
from null_llm import null_llm

from carryall.client import AsyncClient, CallTimeoutError, Client
from carryall.client.options import Options, Sampling, Scheduling
from carryall.client.requests import generate_request
from carryall.errors import (
    QueueFullError,
    RequestError,
    ServiceUnavailableError,
    UnknownModelError,
    UnsupportedTaskError,
    UsageError,
)
from carryall.proto import generation_pb2, sampling_pb2, service_pb2
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.service.core.config import ServerConfig
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.core.served_model import ServedModel
from carryall.runtime.service.grpc.server import GrpcServer
from carryall.runtime.text.tool_messages import as_text
from carryall.runtime.types.sampling_params import SamplingParams

GREEDY: Any = {"temperature": 0, "ignore_eos": True}


def use(work: Callable[[Client, AsyncLLM], None], attempts: int = 1, **options: Any) -> None:
    """Let a thread work with a client of a served engine."""

    async def test() -> None:
        async with null_llm(**options) as llm, serving(llm) as served:

            def call() -> None:
                with Client(served.address, attempts=attempts) as client:
                    work(client, llm)

            await asyncio.to_thread(call)

    asyncio.run(test())


def test_a_continuation_is_what_the_engine_gives() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.001) as llm, serving(llm) as served:
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=2, logprobs=1)
            *_, last = [output async for output in llm.generate("def f(x):", params)]

            def call() -> None:
                with Client(served.address) as client:
                    options: Any = {**GREEDY, "max_tokens": 12, "n": 2, "logprobs": 1}
                    reply = client.generate("def f(x):", **options)
                    parts = list(client.stream("def f(x):", **options))
                    tokens = client.generate(last.prompt_token_ids, **options)
                for found in (reply, tokens):
                    assert [c.text for c in found.completions] == [o.text for o in last.outputs]
                    assert [c.token_ids for c in found.completions] == [o.token_ids for o in last.outputs]
                assert reply.text == last.outputs[0].text
                assert (reply.model, reply.first.finish_reason, reply.first.stop_reason) == (
                    "toy",
                    "length",
                    None,
                )
                assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (
                    len(last.prompt_token_ids),
                    24,
                )
                assert [len(entry.top) for entry in reply.first.logprobs] == [1] * 12
                assert len(parts) > 1
                assert "".join(p.text_delta for p in parts if p.index == 0) == reply.text

            await asyncio.to_thread(call)

    asyncio.run(scenario())


def test_a_conversation() -> None:
    def work(client: Client, llm: AsyncLLM) -> None:
        tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "now", "arguments": {}}}],
            },
            {"role": "tool", "content": "12:00", "tool_call_id": "c"},
        ]
        reply = client.chat(messages, tools=tools, tool_choice="auto", max_tokens=6, **GREEDY)
        told = as_text(messages, tools, system=True)  # the template has no place for tools
        text = "".join(f"[{one['role']}]{one['content']}" for one in told)
        tokens = llm.encode(text, add_special_tokens=False)
        assert client.tokenize(messages, tools=tools) == tokens
        assert reply.text == client.generate(tokens, max_tokens=6, **GREEDY).text
        assert (reply.first.reasoning, reply.first.tool_calls) == ("", [])
        streamed = client.stream_chat(messages, tools=tools, max_tokens=6, **GREEDY)
        assert "".join(piece.content_delta for piece in streamed) == reply.text
        demanded: Any = {
            "tools": tools,
            "tool_choice": {"function": {"name": "now"}},
            "max_tokens": 200,
            "seed": 1,
        }
        (call,) = client.chat(messages[:1], **demanded).first.tool_calls
        assert (call.name, bool(call.id), call.arguments[:1]) == ("now", True, "{")

    use(work)


def test_the_other_calls() -> None:
    def work(client: Client, llm: AsyncLLM) -> None:
        token_ids = client.tokenize("def f(x):")
        assert client.detokenize(token_ids) == "def f(x):"
        (score,) = client.score([("def f(x):", " return x")])
        assert score.logprob == pytest.approx(sum(score.token_logprobs), abs=1e-12)
        ranked = client.rerank("which", ["one", "two", "three"])
        assert [d.score for d in ranked] == sorted((d.score for d in ranked), reverse=True)
        assert [model.name for model in client.models()] == ["toy"]
        assert client.load("toy").name == "toy"
        assert [stats.model for stats in client.stats()] == ["toy"]
        with pytest.raises(UnsupportedTaskError, match="cannot return hidden states"):
            client.embed(["text"])
        client.unload("toy")
        assert client.stats() == []

    use(work)


def test_closing_the_iterator_cancels_the_request() -> None:
    def work(client: Client, llm: AsyncLLM) -> None:
        stream = client.stream("x", max_tokens=4000, **GREEDY)
        assert next(stream).token_ids
        assert llm.stats().running == 1
        stream.close()  # type: ignore[attr-defined]  # it is a generator
        until(lambda: llm.stats().running == 0)
        assert llm.stats().cancelled == 1

    use(work, step_seconds=0.002)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda client: client.generate("x", top_p=2), RequestError, "top_p must be a number"),
        (lambda client: client.generate("x", model="no"), UnknownModelError, "there is no model 'no'"),
        (lambda client: client.generate("x", top_q=1), RequestError, "no option 'top_q'"),
        (lambda client: client.generate("x", top_p="a"), RequestError, "wrong type"),
        (lambda client: client.chat([{"content": "x"}]), RequestError, "a message must have a role"),
        (lambda client: client.chat([], tool_choice="x"), RequestError, "tool_choice must be one of"),
        (lambda client: client.embed(["x"], pooling="x"), RequestError, "pooling must be 'last' or 'mean'"),
        (lambda client: client.generate("x", max_tokens=4000, timeout=0.1), CallTimeoutError, "Deadline"),
    ],
)
def test_errors_are_those_of_the_service(
    call: Callable[[Client], Any], error: type[Exception], message: str
) -> None:
    def work(client: Client, llm: AsyncLLM) -> None:
        with pytest.raises(error, match=message):
            call(client)

    use(work, step_seconds=0.002)


@pytest.mark.long
def test_a_call_is_repeated_after_the_time_that_the_server_states() -> None:
    async def scenario() -> None:
        async with null_llm(max_slots=1, max_queue=1, step_seconds=0.005) as llm, serving(llm) as served:

            def call() -> None:
                with Client(served.address, attempts=1) as once, Client(served.address) as often:
                    running, waiting = occupied(once, llm)
                    with pytest.raises(QueueFullError, match="retry later"):
                        once.generate("z", max_tokens=2, **GREEDY)
                    threading.Timer(0.3, lambda: (running.close(), waiting.cancel())).start()
                    start = time.monotonic()
                    assert len(often.generate("z", max_tokens=2, **GREEDY).first.token_ids) == 2
                    assert 0.9 < time.monotonic() - start < 15  # the server asks for one second

            await asyncio.to_thread(call)

    asyncio.run(scenario())


def occupied(client: Client, llm: AsyncLLM) -> tuple[Any, Any]:
    """A running and a waiting request."""
    running = client.stream("x", max_tokens=4000, **GREEDY)
    next(running)
    waiting = client._stub.Generate(generate_request("", "y", {"max_tokens": 9}))
    until(lambda: llm.stats().waiting == 1)
    return running, waiting


def test_an_unreachable_server_is_unavailable() -> None:
    with Client("127.0.0.1:1", attempts=1) as client, pytest.raises(ServiceUnavailableError):
        client.models()


@pytest.mark.long
def test_a_call_waits_for_a_model_that_loads() -> None:
    async def scenario() -> None:
        loaded = threading.Event()
        async with null_llm() as llm:

            def load() -> ServedModel:
                loaded.wait()
                return ServedModel(llm, INFO)

            models = ModelRepository.of_one("toy", load)
            server = GrpcServer(models, ServerConfig(grpc_port=0))
            address = await server.start()
            loading = asyncio.create_task(models.load_all())
            threading.Timer(0.3, loaded.set).start()
            async with AsyncClient(address) as client:
                assert (await client.generate("x", max_tokens=2, **GREEDY)).text
            await loading
            await server.stop()

    asyncio.run(scenario())


def test_a_stream_that_has_begun_is_not_repeated() -> None:
    def work(client: Client, llm: AsyncLLM) -> None:
        stream = client.stream("x", max_tokens=4000, **GREEDY)
        next(stream)
        threading.Timer(0.1, llm.shutdown).start()
        with pytest.raises(ServiceUnavailableError, match="shut down"):
            list(stream)
        assert llm.stats().prompt_tokens == len(llm.encode("x"))

    use(work, attempts=4, step_seconds=0.002)


@pytest.mark.parametrize("attempts", [0, 6])
def test_attempts_have_bounds(attempts: int) -> None:
    with pytest.raises(UsageError, match="from 1"):
        Client("x:1", attempts=attempts)


def test_sampling_options_are_those_on_the_wire() -> None:
    fields = {field.name for field in sampling_pb2.SamplingOptions.DESCRIPTOR.fields}
    assert Sampling.__optional_keys__ == fields - {"others"}
    scheduling = Scheduling.__optional_keys__
    assert scheduling < {field.name for field in generation_pb2.GenerateRequest.DESCRIPTOR.fields}
    assert scheduling < {field.name for field in generation_pb2.ChatRequest.DESCRIPTOR.fields}


def test_formats_and_bans_become_messages() -> None:
    options: Options = {"bad_words": ["no", [1, 2]], "stop": "end", "max_tokens": 3, "priority": -1}
    request = generate_request("m", "x", options)
    assert request.sampling.bad_words[1].token_ids.ids == [1, 2]
    assert (list(request.sampling.stop), request.priority, request.model) == (["end"], -1, "m")
    for form, expected in (
        ({"json_schema": {"type": "object"}}, '{"type": "object"}'),
        ({"choice": ["a", "b"]}, sampling_pb2.Choice(texts=["a", "b"])),
        ({"regex": "a+"}, "a+"),
    ):
        output = generate_request("", "x", {"structured_output": form}).sampling.structured_output
        (name,) = form
        assert getattr(output, name) == expected
    marks: dict[str, Any] = {"kind": "synthid", "keys": [3, 4]}
    for given, marked in ((True, sampling_pb2.Watermark()), (marks, sampling_pb2.Watermark(**marks))):
        sampling = generate_request("", "x", {"watermark": given}).sampling
        assert sampling.HasField("watermark")
        assert sampling.watermark == marked
    assert not generate_request("", "x", {"watermark": False}).sampling.HasField("watermark")


def test_the_client_loads_neither_numpy_nor_a_tensor_runtime() -> None:
    heavy = "{'numpy', 'onnx', 'onnxruntime', 'openvino', 'carryall.runtime'}"
    code = f"import sys, carryall.client; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_method_of_the_service_has_one_in_both_clients() -> None:
    names = {"ListModels": "models", "LoadModel": "load", "UnloadModel": "unload", "GetStats": "stats"}
    service = service_pb2.DESCRIPTOR.services_by_name["GenerationService"]
    methods = {names.get(method.name, method.name.lower()) for method in service.methods}
    for kind in (Client, AsyncClient):
        assert {name for name in vars(kind) if not name.startswith("_")} == methods | {
            "close", "stream", "stream_chat", "embed_sparse", "embed_tokens"
        }  # fmt: skip
    for name in methods:
        own, other = (inspect.signature(getattr(kind, name)).parameters for kind in (Client, AsyncClient))
        assert own == other
