"""Models that go when no request comes, and come back with the next one."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from api_keys import key_file
from grpc_serving import INFO
from http_serving import HttpServed, http_serving
from null_llm import null_llm, null_model

from carryall.errors import CheckpointError, UsageError
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.core.served_model import ServedModel

BODY = {"prompt": "def f(", "max_tokens": 2, "temperature": 0}


class Counted:
    """A model that counts how often it is loaded, which takes some time and may fail."""

    def __init__(self, seconds: float = 0.2) -> None:
        self.times, self.seconds, self.broken = 0, seconds, False

    def __call__(self) -> ServedModel:
        self.times += 1
        time.sleep(self.seconds)
        if self.broken:
            raise UsageError("the file is gone")
        return ServedModel(AsyncLLM(null_model()), INFO)


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def later(models: ModelRepository, seconds: float) -> None:
    """Let models be unused for longer than they are."""
    for entry in models.entries:
        entry._used -= seconds
        if entry.model is not None:
            entry.handler.requests.last_ended -= seconds


def state(models: ModelRepository) -> str:
    return models.entries[0].state


def idle(scenario: Any, load: Counted, keep_seconds: float | None) -> None:
    async def run() -> None:
        models = ModelRepository.of_one("toy", load, keep_seconds=keep_seconds)
        async with http_serving(None, models) as served:
            await scenario(models, served)
        models.close()

    asyncio.run(run())


def test_an_idle_model_goes_and_the_next_requests_wait_for_it() -> None:
    load = Counted()

    async def scenario(models: ModelRepository, served: HttpServed) -> None:
        first = (await served.post("/v1/completions", **BODY)).json()["choices"]
        await models.unload_idle()
        assert state(models) == "ready"
        later(models, 99)
        await models.unload_idle()
        assert state(models) == "ready"
        later(models, 2)
        await models.unload_idle()
        assert state(models) == "unloaded"
        assert models.ready  # it comes back by itself
        assert (await served.client.get("/health")).status_code == 200
        assert (await served.client.get("/api/ps")).json() == {"models": []}
        assert [model["id"] for model in (await served.client.get("/v1/models")).json()["data"]] == ["toy"]
        answers = await asyncio.gather(*[served.post("/v1/completions", **BODY) for _ in range(3)])
        assert [answer.json()["choices"] for answer in answers] == [first] * 3
        assert load.times == 2

    idle(scenario, load, 100)


def test_a_model_that_loads_at_startup_is_listed_and_waited_for() -> None:
    may_load = threading.Event()

    async def scenario() -> None:
        async with null_llm() as llm:

            def load() -> ServedModel:
                assert may_load.wait(30)
                return ServedModel(llm, INFO)

            models = ModelRepository.of_one("toy", load, aliases={"gpt-4o": "toy"})
            async with http_serving(None, models, load=False) as served:
                loading = asyncio.create_task(models.load_all())
                try:
                    while state(models) != "loading":
                        await asyncio.sleep(0.001)
                    listed = (await served.client.get("/v1/models")).json()["data"]
                    assert [(model["id"], model["max_model_len"]) for model in listed] == [
                        ("toy", None),
                        ("gpt-4o", None),
                    ]
                    assert len((await served.client.get("/api/tags")).json()["models"]) == 2
                    assert (await served.client.get("/api/ps")).json() == {"models": []}
                    assert (await served.client.get("/health")).status_code == 503
                    asked = asyncio.create_task(served.post("/v1/completions", **BODY))
                    await asyncio.sleep(0.1)
                    assert not asked.done()
                finally:
                    may_load.set()
                assert (await asked).status_code == 200
                await loading

    asyncio.run(scenario())


def test_models_that_load_after_others_at_startup_are_waited_for() -> None:
    may_load = threading.Event()

    async def scenario() -> None:
        async with null_llm() as llm, null_llm() as other:

            def load() -> ServedModel:
                assert may_load.wait(30)
                return ServedModel(llm, INFO)

            def fail() -> ServedModel:
                raise CheckpointError("it has no weights")

            models = ModelRepository(
                {"a": load, "b": lambda: ServedModel(other, INFO), "c": fail}, default="a"
            )
            async with http_serving(None, models, load=False) as served:
                loading = asyncio.create_task(models.load_all())
                try:
                    while state(models) != "loading":
                        await asyncio.sleep(0.001)
                    listed = (await served.client.get("/v1/models")).json()["data"]
                    assert [model["id"] for model in listed] == ["a", "b", "c"]
                    bodies = [{**BODY, "model": name} for name in "abc"]
                    asked = [asyncio.create_task(served.post("/v1/completions", **body)) for body in bodies]
                    await asyncio.sleep(0.1)
                    assert not any(one.done() for one in asked)
                finally:
                    may_load.set()
                answers = await asyncio.gather(*asked)
                assert [answer.status_code for answer in answers] == [200, 200, 503]
                assert "it has no weights" in answers[2].text
                await loading

    asyncio.run(scenario())


def test_requests_end_their_wait_when_loading_ends_early() -> None:
    may_load = threading.Event()

    async def scenario() -> None:
        async with null_llm() as llm:

            def load() -> ServedModel:
                assert may_load.wait(30)
                return ServedModel(llm, INFO)

            models = ModelRepository({"a": load, "b": load}, default="a")
            async with http_serving(None, models, load=False) as served:
                loading = asyncio.create_task(models.load_all())
                asked = asyncio.create_task(served.post("/v1/completions", **{**BODY, "model": "b"}))
                await asyncio.sleep(0.1)
                assert not asked.done()
                loading.cancel()
                may_load.set()
                answer = await asyncio.wait_for(asked, 10)
                assert answer.status_code == 503
                assert "not loaded" in answer.text

    asyncio.run(scenario())


def test_a_model_stays_unless_told_otherwise() -> None:
    async def scenario(models: ModelRepository, served: HttpServed) -> None:
        later(models, 1e9)
        await models.unload_idle()
        (model,) = (await served.client.get("/api/ps")).json()["models"]
        assert datetime.fromisoformat(model["expires_at"]).year > 2200

    idle(scenario, Counted(0), None)


@pytest.mark.long
@pytest.mark.parametrize(
    ("keep", "seconds"), [(30, 30), ("1m", 60), ("1h30m", 5400), ("2.5s", 2.5), ("1500ms", 1.5), ("30", 30)]
)
def test_a_request_of_ollama_sets_how_long(keep: Any, seconds: float) -> None:
    async def scenario(models: ModelRepository, served: HttpServed) -> None:
        answer = await served.post("/api/generate", prompt="x", raw=True, stream=False, keep_alive=keep,
                                   options={"num_predict": 1})  # fmt: skip
        assert answer.status_code == 200, answer.text
        (model,) = (await served.client.get("/api/ps")).json()["models"]
        left = datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)
        assert seconds - 2 < left.total_seconds() <= seconds
        later(models, seconds + 1)
        await models.unload_idle()
        assert state(models) == "unloaded"

    idle(scenario, Counted(0), None)


@pytest.mark.parametrize("keep", [-1, "-1m", -0.5])
def test_below_zero_is_for_good(keep: Any) -> None:
    async def scenario(models: ModelRepository, served: HttpServed) -> None:
        answer = await served.post("/api/chat", messages=[], keep_alive=keep)
        assert answer.json()["done_reason"] == "load"
        later(models, 1e9)
        await models.unload_idle()
        assert state(models) == "ready"

    idle(scenario, Counted(0), 100)


def test_zero_lets_a_model_go_and_is_told() -> None:
    async def scenario(models: ModelRepository, served: HttpServed) -> None:
        answer = await served.post("/api/generate", keep_alive=0)
        assert answer.json()["done_reason"] == "unload"
        later(models, 1)
        await models.unload_idle()
        assert state(models) == "unloaded"
        # The next request loads it again, for the time of the service.
        assert (await served.post("/v1/completions", **BODY)).status_code == 200
        later(models, 99)
        await models.unload_idle()
        assert state(models) == "ready"

    idle(scenario, Counted(0), 100)


@pytest.mark.long
@pytest.mark.parametrize("keep", ["soon", "5", "5 m", [], {}, True, "nan", "1d"])
def test_other_times_are_errors(keep: Any) -> None:
    async def scenario(models: ModelRepository, served: HttpServed) -> None:
        answer = await served.post("/api/generate", prompt="x", raw=True, keep_alive=keep)
        if keep == "5":  # a number as a text
            assert answer.status_code == 200
        else:
            assert (answer.status_code, "keep_alive" in answer.text) == (400, True)

    idle(scenario, Counted(0), None)


def test_a_model_that_cannot_come_back_is_told_to_all_that_wait() -> None:
    load = Counted()

    async def scenario(models: ModelRepository, served: HttpServed) -> None:
        later(models, 101)
        await models.unload_idle()
        load.broken = True
        answers = await asyncio.gather(*[served.post("/v1/completions", **BODY) for _ in range(2)])
        assert [answer.status_code for answer in answers] == [503, 503]
        assert "the file is gone" in answers[0].text

    idle(scenario, load, 100)


def test_a_model_at_work_does_not_go() -> None:
    async def scenario(models: ModelRepository, served: HttpServed) -> None:
        handler = models.llm()
        with handler._in_progress():
            later(models, 1e6)
            await models.unload_idle()
            assert state(models) == "ready"

    idle(scenario, Counted(0), 100)


def test_with_keys_an_admin_alone_sets_it(tmp_path: Path) -> None:
    keys = key_file(tmp_path, alice="", root="admin = true")

    async def run() -> None:
        models = ModelRepository.of_one("toy", Counted(0))
        async with http_serving(None, models, api_keys=keys) as served:
            for name, ignored, kept in (("alice", "keep_alive", None), ("root", None, 0.0)):
                body = {"keep_alive": 0, "prompt": ""}
                key = {"x-api-key": f"{name}-key"}
                answer = await served.client.post("/api/generate", json=body, headers=key)
                assert answer.headers.get("X-Carryall-Ignored-Fields") == ignored
                assert models.entries[0].keep_seconds == kept
        models.close()

    asyncio.run(run())
