"""The life of a service, ended by signals."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator

import grpc
import pytest
from grpc_serving import code_of, read, repository
from null_llm import null_llm

from carryall.errors import EngineClosedError, PackageError, UsageError
from carryall.proto import generation_pb2 as pb
from carryall.proto import sampling_pb2, service_pb2_grpc
from carryall.runtime.service.core.config import ServerConfig
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.core.served_model import ServedModel
from carryall.runtime.service.serve import Addresses, serve

CONFIG = ServerConfig(grpc_port=0, http_port=None, grace_seconds=5.0)


def never(addresses: Addresses) -> None:
    pytest.fail("must not become ready")


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that would not end the test's own process."""
    before = signal.signal(request.param, lambda number, frame: None)
    yield request.param
    signal.signal(request.param, before)


@pytest.mark.long
def test_a_signal_drains_and_ends(number: signal.Signals) -> None:
    before = signal.getsignal(number)

    async def scenario() -> list[pb.GenerateResponse]:
        ready: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
        async with null_llm(step_seconds=0.002) as llm:
            service = asyncio.create_task(serve(repository(llm), CONFIG, ready.set_result))
            async with grpc.aio.insecure_channel((await ready).grpc or "") as channel:
                stub = service_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
                sampling = sampling_pb2.SamplingOptions(max_tokens=100, ignore_eos=True)
                call = stub.Generate(pb.GenerateRequest(text="x", sampling=sampling))
                first = await call.read()
                signal.raise_signal(number)
                messages = [first, *await read(call)]
            assert await asyncio.wait_for(service, 10)
            return messages

    messages = asyncio.run(scenario())
    assert messages[-1].usage.completion_tokens == 100  # not cut short
    assert signal.getsignal(number) is before


def test_a_second_signal_does_what_it_did_before() -> None:
    caught: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))

    async def scenario() -> None:
        ready: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
        async with null_llm() as llm:
            service = asyncio.create_task(serve(repository(llm), CONFIG, ready.set_result))
            await ready
            signal.raise_signal(signal.SIGTERM)
            assert caught == []
            signal.raise_signal(signal.SIGTERM)
            assert caught == [signal.SIGTERM]
            await service

    try:
        asyncio.run(scenario())
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_while_loading_does_not_wait_for_the_model() -> None:
    loading, released = threading.Event(), threading.Event()

    def load() -> ServedModel:
        loading.set()
        released.wait(10)
        raise PackageError("released too late")

    async def scenario() -> None:
        service = asyncio.create_task(serve(ModelRepository.of_one("toy", load), CONFIG, never))
        await asyncio.to_thread(loading.wait, 5)
        signal.raise_signal(signal.SIGTERM)
        assert await asyncio.wait_for(service, 5)

    asyncio.run(scenario())
    assert not released.is_set()
    released.set()


def test_a_model_that_cannot_be_loaded_ends_the_service() -> None:
    def load() -> ServedModel:
        raise PackageError("model.onnx.data is cut off")

    with pytest.raises(PackageError, match="cut off"):
        asyncio.run(serve(ModelRepository.of_one("toy", load), CONFIG, never))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the engine's traceback
def test_a_dead_engine_ends_the_service() -> None:
    def die(rows: object) -> None:
        raise MemoryError("not a fault that the engine knows")

    async def scenario() -> None:
        ready: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
        async with null_llm(before_forward=die) as llm:
            service = asyncio.create_task(serve(repository(llm), CONFIG, ready.set_result))
            async with grpc.aio.insecure_channel((await ready).grpc or "") as channel:
                stub = service_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
                code, details = await code_of(read(stub.Generate(pb.GenerateRequest(text="x"))))
                assert (code, "MemoryError" in details) == (grpc.StatusCode.UNAVAILABLE, True), details
                with pytest.raises(EngineClosedError):
                    await asyncio.wait_for(service, 10)

    asyncio.run(scenario())


@pytest.mark.long
def test_a_taken_port_is_known_before_loading() -> None:
    async def scenario() -> None:
        ready: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
        async with null_llm() as llm:
            first = asyncio.create_task(serve(repository(llm), CONFIG, ready.set_result))
            port = int(((await ready).grpc or "").rpartition(":")[2])
            models = ModelRepository.of_one("toy", lambda: pytest.fail("must not load"))
            with pytest.raises(UsageError, match=str(port)):
                await serve(models, ServerConfig(grpc_port=port, http_port=None), never)
            signal.raise_signal(signal.SIGTERM)
            await first

    asyncio.run(scenario())
