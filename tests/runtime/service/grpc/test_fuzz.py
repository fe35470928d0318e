"""Random messages to every method: each call ends with a proper status, and the server lives on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from fuzzing import damaged, fuzz, seeds
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_serving import Served, serving
from hypothesis import strategies as st
from null_llm import null_llm
from tensor_models import mixed_repository, sum_model

from carryall.proto import kserve_pb2, service_pb2, vllm_engine_pb2
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.types.sampling_params import SamplingParams

SERVICES = [
    service_pb2.DESCRIPTOR.services_by_name["GenerationService"],
    kserve_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
    vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"],
]
METHODS = [method for service in SERVICES for method in service.methods]
# The codes of a server that is sound; INTERNAL and UNKNOWN are faults of its own.
PROPER = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,  # after UnloadModel
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
KIND = FieldDescriptor
SMALL = st.one_of(st.integers(0, 3), st.sampled_from([7, 255, 2**31 - 1]))
TEXT = st.one_of(
    st.sampled_from(
        ["", "toy", "sum", "A", "B", "text_input", "FP32", "BYTES", "user", "{}", "[]", '{"type": 1}']
    ),
    st.text(max_size=8),
)
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    KIND.TYPE_BOOL: st.booleans(),
    KIND.TYPE_STRING: TEXT,
    KIND.TYPE_BYTES: st.binary(max_size=24),
    KIND.TYPE_FLOAT: st.floats(width=32),
    KIND.TYPE_DOUBLE: st.floats(),
    KIND.TYPE_UINT32: st.one_of(SMALL, st.just(2**32 - 1)),
    KIND.TYPE_UINT64: st.one_of(SMALL, st.just(2**64 - 1)),
    KIND.TYPE_INT32: st.one_of(SMALL, st.just(-(2**31))),
    KIND.TYPE_INT64: st.one_of(SMALL, st.integers(-2, 4), st.just(-(2**63))),
    KIND.TYPE_ENUM: st.integers(-1, 6),
}


@st.composite
def messages(draw: st.DrawFn, descriptor: Any, depth: int = 4) -> Message:
    """A random message: any of its fields, with small or extreme values."""
    made = GetMessageClass(descriptor)()
    most = draw(st.sampled_from([1, 6])) if len(descriptor.fields) > 3 else 7  # in ten
    for field in descriptor.fields:
        if depth <= 0 or draw(st.integers(0, 9)) >= most:
            continue
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map:
            _draw_map(draw, made, field, depth)
        elif field.message_type is not None and field.is_repeated:
            getattr(made, field.name).extend(
                draw(st.lists(messages(field.message_type, depth - 1), max_size=2))
            )
        elif field.message_type is not None:
            getattr(made, field.name).CopyFrom(draw(messages(field.message_type, depth - 1)))
        elif field.is_repeated:
            getattr(made, field.name).extend(draw(st.lists(SCALARS[field.type], max_size=3)))
        else:
            setattr(made, field.name, draw(SCALARS[field.type]))
    return made


def _draw_map(draw: st.DrawFn, made: Message, field: FieldDescriptor, depth: int) -> None:
    assert field.message_type is not None
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for _ in range(draw(st.integers(0, 2))):
        name = draw(SCALARS[key.type])
        if value.message_type is not None:
            getattr(made, field.name)[name].CopyFrom(draw(messages(value.message_type, depth - 1)))
        else:
            getattr(made, field.name)[name] = draw(SCALARS[value.type])


@st.composite
def calls(draw: st.DrawFn) -> tuple[MethodDescriptor, Message]:
    """A method and a request to it."""
    method = draw(st.sampled_from(METHODS))
    return method, draw(messages(method.input_type))


SEEDS = seeds("grpc")  # named by their method: NAME.METHOD
ANY_BYTES = st.tuples(
    st.sampled_from(METHODS),
    st.sampled_from(SEEDS).flatmap(lambda path: damaged(path.read_bytes())) | st.binary(max_size=60),
)


@pytest.mark.long
@pytest.mark.parametrize("examples", [100, pytest.param(None, marks=pytest.mark.slow)])
def test_random_messages(examples: int | None) -> None:
    fuzz_service(calls().map(lambda call: (call[0], call[1].SerializeToString())), examples)


@pytest.mark.long
@pytest.mark.parametrize("examples", [60, pytest.param(None, marks=pytest.mark.slow)])
def test_damaged_messages(examples: int | None) -> None:
    fuzz_service(ANY_BYTES, examples)


@pytest.mark.long
def test_kept_messages() -> None:
    def send_all(send: Callable[[tuple[MethodDescriptor, bytes]], None]) -> None:
        for path in SEEDS:
            own = [one for one in METHODS if one.name == path.suffix.removeprefix(".")]
            assert own, path
            for method in own:
                send((method, path.read_bytes()))

    asyncio.run(with_service(send_all))


def fuzz_service(strategy: st.SearchStrategy[Any], examples: int | None) -> None:
    asyncio.run(with_service(lambda send: fuzz(strategy, send, examples)))


async def with_service(work: Callable[[Callable[[tuple[MethodDescriptor, bytes]], None]], None]) -> None:
    """Run ``work`` in a thread, with a function that calls a method of a service and checks the status."""
    async with null_llm(max_queue=8) as llm:
        models = mixed_repository(llm, {"sum": sum_model()})
        async with serving(llm, models) as served, grpc.aio.insecure_channel(served.address) as channel:
            loop = asyncio.get_running_loop()

            def send(call: tuple[MethodDescriptor, bytes]) -> None:
                method, request = call
                code = asyncio.run_coroutine_threadsafe(_code(channel, method, request), loop).result(20)
                assert code in PROPER, (method.full_name, request, code)

            await asyncio.to_thread(work, send)
            assert await served.health_status() == "SERVING"


async def _code(channel: grpc.aio.Channel, method: MethodDescriptor, request: bytes) -> grpc.StatusCode:
    path = f"/{method.containing_service.full_name}/{method.name}"
    read = GetMessageClass(method.output_type).FromString
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, True): channel.stream_stream,
    }
    stub: Any = kinds[method.client_streaming, method.server_streaming]
    argument = iter([request, request]) if method.client_streaming else request
    call = stub(path, response_deserializer=read)(argument, timeout=1.0)
    return grpc.StatusCode(await call.code())


@pytest.mark.parametrize(
    "path", ["carryall.v1.GenerationService/Generate", "inference.GRPCInferenceService/ModelInfer"]
)
def test_bytes_that_are_no_message(path: str) -> None:
    async def scenario() -> None:
        async with (
            null_llm() as llm,
            serving(llm) as served,
            grpc.aio.insecure_channel(served.address) as channel,
        ):
            for data in (b"\xff" * 50, b"\x0a\xff\xff\xff\xff\x0f", b"\x00", b"\x0a\x02\xff\xfe"):
                method: Any = channel.unary_unary(f"/{path}")
                call = method(data, timeout=30)
                assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
            await _lives(llm, served)

    asyncio.run(scenario())


async def _lives(llm: AsyncLLM, served: Served) -> None:
    assert await served.health_status() == "SERVING"
    assert [output async for output in llm.generate("x", SamplingParams(max_tokens=2))][-1].finished


def test_bytes_that_are_no_http2() -> None:
    """Garbage, and a TLS handshake where none is spoken."""

    async def scenario() -> None:
        async with null_llm() as llm, serving(llm) as served:
            host, _, port = served.address.rpartition(":")
            for data in (
                b"GET / HTTP/1.1\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01" + b"\x00" * 60,
                b"\xff" * 4096,
            ):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(data)
                await writer.drain()
                writer.close()
            await _lives(llm, served)

    asyncio.run(scenario())
