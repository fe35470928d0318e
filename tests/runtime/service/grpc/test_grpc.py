"""Generate over a real socket: streams, faults, cancellation, health, drain."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_serving import code_of, joined, read, repository, serving
from null_llm import null_llm

from carryall.errors import ProviderRuntimeError, UsageError
from carryall.proto import generation_pb2 as pb
from carryall.proto.models_pb2 import MODEL_STATE_LOADING, GetStatsRequest, ListModelsRequest
from carryall.proto.tasks_pb2 import TokenizeRequest
from carryall.runtime.service.core.config import ServerConfig
from carryall.runtime.service.grpc.server import SERVICE, GrpcServer
from carryall.runtime.types.sampling_params import SamplingParams


def ask(prompt: str = "def f(x):", **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=prompt, sampling={"ignore_eos": True, **sampling})


ENDLESS = ask(max_tokens=4000)


def test_a_stream_is_what_the_engine_gives() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.01) as llm, serving(llm) as served:
            messages = await read(served.stub.Generate(ask(temperature=0, max_tokens=12, logprobs=2)))
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            *_, last = [output async for output in llm.generate("def f(x):", params)]
        assert joined(messages) == (last.outputs[0].text, last.outputs[0].token_ids)
        assert len(messages) > 1
        assert [entry.chosen.token_id for m in messages for entry in m.logprobs] == last.outputs[0].token_ids
        assert [len(entry.top) for m in messages for entry in m.logprobs] == [2] * 12
        assert [m.finish_reason for m in messages[:-1]] == [pb.FINISH_REASON_UNSPECIFIED] * (
            len(messages) - 1
        )
        assert messages[-1].finish_reason == pb.FINISH_REASON_LENGTH
        assert messages[-1].usage.prompt_tokens == len(last.prompt_token_ids)
        assert messages[-1].usage.completion_tokens == 12
        assert len({m.request_id for m in messages}) == 1

    asyncio.run(scenario())


def test_concurrent_streams_do_not_touch_each_other() -> None:
    requests = [ask(f"prompt {n}", seed=n, temperature=0.2 * n, max_tokens=5 + 3 * n) for n in range(9)]

    async def scenario() -> None:
        async with null_llm(max_slots=4) as llm, serving(llm) as served:
            together = await asyncio.gather(*[read(served.stub.Generate(request)) for request in requests])
            alone = [await read(served.stub.Generate(request)) for request in requests]
        assert [joined(messages) for messages in together] == [joined(messages) for messages in alone]
        assert [len(joined(messages)[1]) for messages in alone] == [5 + 3 * n for n in range(9)]

    asyncio.run(scenario())


def test_a_chat_is_written_by_the_template() -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    options = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    chat = pb.ChatRequest(messages=turns, sampling=options)

    async def scenario() -> None:
        async with null_llm() as llm, serving(llm) as served:
            rendered = llm.tokenizer.encode("[user]Hi[assistant]Ho", add_special_tokens=False)
            tokens = pb.GenerateRequest(token_ids={"ids": rendered}, sampling=options)
            assert joined(await read(served.stub.Chat(chat))) == joined(
                await read(served.stub.Generate(tokens))
            )

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pb.GenerateRequest(), "no prompt"),
        (ask(top_p=2), "top_p must be a number of more than 0"),
        (pb.GenerateRequest(token_ids={"ids": []}), "prompt is empty"),
        (pb.GenerateRequest(token_ids={"ids": [10**6]}), "outside the vocabulary"),
        (pb.GenerateRequest(token_ids={"ids": [1] * 5000}), "5000 tokens"),
    ],
)
def test_a_request_at_fault_is_an_invalid_argument(request_: pb.GenerateRequest, message: str) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, serving(llm) as served:
            code, details = await code_of(read(served.stub.Generate(request_)))
            assert (code, message in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details
            assert joined(await read(served.stub.Generate(ask(max_tokens=2))))[1]  # others live on

    asyncio.run(scenario())


def test_a_full_queue_asks_to_retry() -> None:
    async def scenario() -> None:
        async with null_llm(max_slots=1, max_queue=1, step_seconds=0.005) as llm, serving(llm) as served:
            running = served.stub.Generate(ENDLESS)
            await running.read()
            waiting = served.stub.Generate(ENDLESS)
            while not llm.stats().waiting:
                assert not waiting.done()
                await asyncio.sleep(0.005)
            code, details = await code_of(read(served.stub.Generate(ask())))
            assert (code, "retry later" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True), details

    asyncio.run(scenario())


def test_a_request_id_in_use_is_refused_and_its_owner_lives_on() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.002) as llm, serving(llm) as served:
            request = pb.GenerateRequest(
                text="x", request_id="r1", sampling={"max_tokens": 50, "ignore_eos": True}
            )
            owner = served.stub.Generate(request)
            first = await owner.read()
            assert first.request_id == "r1"
            code, details = await code_of(read(served.stub.Generate(request)))
            assert (code, "'r1' is in use" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details
            assert len(joined([first, *await read(owner)])[1]) == 50

    asyncio.run(scenario())


def test_a_failing_model_is_an_internal_error() -> None:
    def fail(rows: object) -> None:
        raise ProviderRuntimeError("the device is on fire")

    async def scenario() -> None:
        async with null_llm(before_forward=fail) as llm, serving(llm) as served:
            code, details = await code_of(read(served.stub.Generate(ask())))
            assert (code, "on fire" in details) == (grpc.StatusCode.INTERNAL, True), details

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_an_abandoned_request_frees_its_slot(how: str) -> None:
    async def scenario() -> None:
        async with null_llm(max_slots=1, step_seconds=0.002) as llm, serving(llm) as served:
            call = served.stub.Generate(ENDLESS, timeout=0.2 if how == "deadline" else None)
            assert (await call.read()).token_ids
            assert llm.stats().running == 1
            if how == "cancel":
                call.cancel()
            else:
                assert (await code_of(read(call)))[0] == grpc.StatusCode.DEADLINE_EXCEEDED
            messages = await asyncio.wait_for(read(served.stub.Generate(ask(max_tokens=3))), 5)
            assert len(joined(messages)[1]) == 3
            assert (llm.stats().running, served.models.llm().active) == (0, 0)

    asyncio.run(scenario())


def test_while_loading_calls_wait() -> None:
    async def scenario() -> None:
        async with serving(None) as served:
            assert await served.health_status() == "NOT_SERVING"
            for call in (
                read(served.stub.Generate(ask(), timeout=0.3)),
                served.stub.Tokenize(TokenizeRequest(text="x"), timeout=0.3),
            ):
                assert (await code_of(call))[0] == grpc.StatusCode.DEADLINE_EXCEEDED
            stats = served.stub.GetStats(GetStatsRequest(model="toy"))
            assert (await code_of(stats))[0] == grpc.StatusCode.UNAVAILABLE
            (model,) = (await served.stub.ListModels(ListModelsRequest())).models
            assert (model.name, model.state, model.vocab_size) == ("toy", MODEL_STATE_LOADING, 0)
            assert not (await served.stub.GetStats(GetStatsRequest())).models

    asyncio.run(scenario())


def test_the_services_describe_themselves() -> None:
    def listed(address: str) -> tuple[set[str], list[str]]:
        with grpc.insecure_channel(address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            service = DescriptorPool(database).FindServiceByName(SERVICE)
            return set(database.get_services()), [method.name for method in service.methods]

    async def scenario() -> None:
        async with serving(None) as served:
            services, methods = await asyncio.to_thread(listed, served.address)
        assert {SERVICE, "grpc.health.v1.Health"} <= services
        assert {"Generate", "Chat", "Embed", "GetStats"} < set(methods)

    asyncio.run(scenario())


def test_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.002) as llm, serving(llm, grace_seconds=10.0) as served:
            statuses: list[int] = []

            async def watch() -> None:
                async for answer in served.health.Watch(health_pb2.HealthCheckRequest(service=SERVICE)):
                    statuses.append(answer.status)

            watching = asyncio.create_task(watch())
            running = served.stub.Generate(ask(max_tokens=100))
            first = await running.read()
            assert await served.health_status() == "SERVING"
            stopping = asyncio.create_task(served.stop())
            while await served.health_status() == "SERVING":
                await asyncio.sleep(0.005)
            code, details = await code_of(read(served.stub.Generate(ask())))
            assert (code, "shutting down" in details) == (grpc.StatusCode.UNAVAILABLE, True), details
            assert len(joined([first, *await read(running)])[1]) == 100
            assert await stopping
            watching.cancel()
            assert statuses == [
                health_pb2.HealthCheckResponse.SERVING,
                health_pb2.HealthCheckResponse.NOT_SERVING,
            ]

    asyncio.run(scenario())


@pytest.mark.long
def test_requests_beyond_the_grace_period_are_cancelled() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.002) as llm, serving(llm, grace_seconds=0.05) as served:
            call = served.stub.Generate(ENDLESS)
            await call.read()
            assert not await served.stop()
            code, _ = await code_of(read(call))
            assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            assert served.models.llm().active == 0
            while llm.stats().running:
                await asyncio.sleep(0.005)

    asyncio.run(scenario())


def test_a_closed_engine_is_unavailable() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.002) as llm, serving(llm) as served:
            call = served.stub.Generate(ENDLESS)
            await call.read()
            llm.shutdown()
            for again in (call, served.stub.Generate(ask())):
                code, details = await code_of(read(again))
                assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED), details

    asyncio.run(scenario())


def test_messages_have_a_size_limit() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, serving(llm, max_body_bytes=1024) as served:
            code, details = await code_of(read(served.stub.Generate(ask("x" * 2000))))
            assert (code, "larger than max" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True), details

    asyncio.run(scenario())


@pytest.mark.parametrize("host", ["127.0.0.1", "no.such.host.invalid"])
def test_an_address_that_cannot_be_bound_is_named(host: str) -> None:
    async def scenario() -> None:
        async with serving(None) as served:
            port = int(served.address.rpartition(":")[2])
            second = GrpcServer(repository(None), ServerConfig(host=host, grpc_port=port))
            with pytest.raises(UsageError, match=f"cannot listen on {host}:{port}"):
                await second.start()

    asyncio.run(scenario())
