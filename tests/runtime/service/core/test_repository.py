"""Models by name, their states, and what requests meet in each."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from grpc_serving import INFO
from null_llm import null_llm

from carryall.errors import (
    EngineClosedError,
    PackageError,
    RequestError,
    ServiceUnavailableError,
    UnknownModelError,
    UsageError,
)
from carryall.runtime.process.garbage import lasting_objects
from carryall.runtime.service.core.config import ServerConfig
from carryall.runtime.service.core.messages import GenerationRequest
from carryall.runtime.service.core.repository import ModelRepository, public_name
from carryall.runtime.service.core.served_model import ServedModel
from carryall.runtime.types.sampling_params import SamplingParams

ASK = GenerationRequest(prompt="def", params=SamplingParams(max_tokens=3, ignore_eos=True))


def broken() -> NoReturn:
    raise PackageError("model.onnx.data is cut off")


def states(models: ModelRepository) -> list[tuple[str, str]]:
    return [(status.name, status.state) for status in models.models()]


def test_the_only_model_answers_requests_that_name_none_it_or_an_alias() -> None:
    async def scenario() -> None:
        async with null_llm() as llm:
            models = ModelRepository.of_one(
                "toy", lambda: ServedModel(llm, INFO), aliases={"gpt-4": "toy", "claude-*": "toy"}
            )
            assert (states(models), models.ready) == ([("toy", "unloaded")], False)
            with pytest.raises(ServiceUnavailableError, match="'toy' is not loaded"):
                models.llm()
            await models.load_all()
            assert (states(models), models.ready) == ([("toy", "ready")], True)
            assert models.llm() is models.llm("") is models.llm("toy") is models.llm("gpt-4")
            assert models.llm("TOY") is models.llm("Toy:1") is models.llm("GPT-4") is models.llm("toy")
            assert models.llm("claude-sonnet-4-5") is models.llm("Claude-x:1") is models.llm("toy")
            assert models.models()[0].info == INFO
            assert models.models()[0].aliases == ("gpt-4",)
            with pytest.raises(UnknownModelError, match="no model 'tox'; there are: toy"):
                models.llm("tox")

    asyncio.run(scenario())


def test_a_request_must_name_one_of_two_models() -> None:
    async def scenario() -> None:
        async with null_llm() as a, null_llm() as b:
            loaders = {"a": lambda: ServedModel(a, INFO), "b": lambda: ServedModel(b, INFO)}
            models = ModelRepository(loaders)
            await models.load("b")
            assert states(models) == [("a", "unloaded"), ("b", "ready")]
            with pytest.raises(RequestError, match="names no model; there are: a, b"):
                models.llm()
            assert len((await models.llm("b").complete(ASK)).choices[0].token_ids) == 3
            assert ModelRepository(loaders, default="b").llm is not None

    asyncio.run(scenario())


def test_a_model_that_fails_to_load_says_so_and_may_be_loaded_again() -> None:
    async def scenario() -> None:
        async with null_llm() as llm:
            attempts: list[Callable[[], ServedModel]] = [lambda: ServedModel(llm, INFO), broken]
            models = ModelRepository.of_one("toy", lambda: attempts.pop()())
            with pytest.raises(PackageError):
                await models.load("toy")
            assert (models.models()[0].state, models.models()[0].reason) == (
                "failed",
                "model.onnx.data is cut off",
            )
            with pytest.raises(ServiceUnavailableError, match=r"has failed: .* is cut off"):
                models.llm()
            await models.load("toy")
            assert (await models.llm().complete(ASK)).usage.completion_tokens == 3

    asyncio.run(scenario())


class Weights(dict[str, Any]):
    """What a model holds in a reference cycle."""


@pytest.mark.long
def test_unloading_frees_what_was_excluded_from_garbage_collection() -> None:
    async def scenario() -> None:
        held: list[weakref.ref[Weights]] = []

        def load() -> ServedModel:
            weights = Weights()
            weights["own"] = weights
            held.append(weakref.ref(weights))
            return ServedModel(llm, INFO, weights)

        async with null_llm() as llm:
            models = ModelRepository.of_one("toy", load)
            with lasting_objects():
                await models.load("toy")
                frozen = gc.get_freeze_count()
                await models.unload("toy")
                assert frozen > 0
                assert held[0]() is None

    asyncio.run(scenario())


def test_unloading_lets_requests_finish_and_frees_the_engine() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.002) as llm, null_llm() as second:
            engines = iter([llm, second])
            models = ModelRepository.of_one("toy", lambda: ServedModel(next(engines), INFO))
            await models.load("toy")
            stream = models.llm().generate(
                GenerationRequest(prompt="x", params=SamplingParams(max_tokens=100, ignore_eos=True))
            )
            first = await anext(stream)
            unloading = asyncio.create_task(models.unload("toy"))
            rest = [delta async for delta in stream]
            assert sum(len(delta.token_ids) for delta in [first, *rest]) == 100
            assert await unloading
            assert states(models) == [("toy", "unloaded")]
            with pytest.raises(EngineClosedError):
                await llm.add_request("x")
            await models.load("toy")
            assert (await models.llm().complete(ASK)).usage.completion_tokens == 3
            assert not models.all_lost.is_set()

    asyncio.run(scenario())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the engine's traceback
def test_one_dead_engine_of_two_leaves_the_other() -> None:
    def die(rows: object) -> None:
        raise MemoryError("not a fault that the engine knows")

    async def scenario() -> None:
        async with null_llm(before_forward=die) as dead, null_llm() as living:
            models = ModelRepository(
                {"dead": lambda: ServedModel(dead, INFO), "living": lambda: ServedModel(living, INFO)}
            )
            await models.load_all()
            with pytest.raises(EngineClosedError):
                await models.llm("dead").complete(ASK)
            assert states(models) == [("dead", "failed"), ("living", "ready")]
            assert not models.all_lost.is_set()
            assert (await models.llm("living").complete(ASK)).usage.completion_tokens == 3

    asyncio.run(scenario())


def test_while_loading_requests_are_told_to_retry() -> None:
    released = threading.Event()

    async def scenario() -> None:
        async with null_llm() as llm:

            def load() -> ServedModel:
                released.wait(10)
                return ServedModel(llm, INFO)

            models = ModelRepository.of_one("toy", load)
            loading = asyncio.create_task(models.load_all())
            while states(models) != [("toy", "loading")]:
                await asyncio.sleep(0.001)
            with pytest.raises(ServiceUnavailableError, match="still loading"):
                await models.llm().complete(ASK)
            released.set()
            await loading
            assert models.ready

    asyncio.run(scenario())


def test_the_public_name_is_the_folders_or_the_hub_id(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("qwen3")
    assert public_name(folder) == folder.name
    assert public_name(f"{folder}/") == folder.name
    assert public_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("alias", ["claude", "=toy", "claude=", ""])
def test_an_alias_needs_a_name_and_a_model(alias: str) -> None:
    with pytest.raises(UsageError, match="an alias must be NAME=MODEL"):
        ServerConfig(aliases=(alias,))


def test_names_of_the_service_and_of_models() -> None:
    config = ServerConfig(served_model_names=("a",), aliases=("claude-*=toy", "b=c"))
    assert config.names_for("toy") == {"a": "toy", "claude-*": "toy", "b": "c"}
    assert config.names_for(None) == {"claude-*": "toy", "b": "c"}
