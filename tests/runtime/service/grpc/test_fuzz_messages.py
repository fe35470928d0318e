"""Messages from strangers to every method of the service: a stated status, and the service lives on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fuzzing import damaged, fuzz, messages, seeds
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc_serving import serving
from hypothesis import strategies as st
from null_llm import null_llm

from carryall.proto import carryall_pb2 as pb

SEEDS = seeds("grpc")  # the suffix names the method
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
# A fault of the service itself would be UNKNOWN or INTERNAL; a call may also outlast its few seconds.
STATED = {
    *(grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE),
    *(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.NOT_FOUND),
    *(grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.UNIMPLEMENTED),
    *(grpc.StatusCode.CANCELLED,),
}
PATIENCE = 0.5  # seconds of a call


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    """To a service in a thread of its own."""
    ready, over = threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    async def serve() -> None:
        async with null_llm() as llm, serving(llm) as served:
            found["address"] = served.address
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        with grpc.insecure_channel(found["address"]) as made:
            yield made
    finally:
        over.set()
        thread.join()


def call(channel: grpc.Channel, name: str, content: bytes) -> grpc.StatusCode:
    """The status of a method that gets these bytes."""
    if METHODS[name].client_streaming:
        return grpc.StatusCode.OK
    kind: Any = channel.unary_stream if METHODS[name].server_streaming else channel.unary_unary
    try:
        answer = kind(name)(content, timeout=PATIENCE)
        if METHODS[name].server_streaming:
            for _ in answer:
                pass
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def check(channel: grpc.Channel, name: str, content: bytes) -> None:
    code = call(channel, name, content)
    assert code in STATED, (name, content, code)


@pytest.mark.parametrize("seed", SEEDS, ids=lambda path: path.name)
def test_kept_messages(seed: Path, channel: grpc.Channel) -> None:
    (name,) = (one for one in METHODS if one.endswith(f"/{seed.suffix.removeprefix('.')}"))
    check(channel, name, seed.read_bytes())


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    name = draw(st.sampled_from(sorted(METHODS)))
    message = draw(messages(METHODS[name].input_type))
    content = message.SerializeToString()
    if not content or draw(st.booleans()):
        return name, content
    other = draw(damaged(content))
    with contextlib.suppress(DecodeError):
        GetMessageClass(METHODS[name].input_type).FromString(other)
        return name, other
    return name, content


@pytest.mark.parametrize("examples", [25, pytest.param(None, marks=pytest.mark.slow)])
def test_any_message_gets_a_stated_status(examples: int | None, channel: grpc.Channel) -> None:
    fuzz(requests(), lambda request: check(channel, *request), examples)
    (generate,) = (one for one in METHODS if one.endswith("LLM/Generate"))
    whole = GetMessageClass(METHODS[generate].input_type)
    request = whole(text="x", sampling=pb.SamplingOptions(max_tokens=2))
    assert call(channel, generate, request.SerializeToString()) is grpc.StatusCode.OK
