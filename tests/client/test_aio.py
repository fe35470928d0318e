"""The client for asyncio, against a served engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from grpc_serving import serving
from null_llm import null_llm

from carryall.client import AsyncClient, CallTimeoutError
from carryall.errors import RequestError, UnknownModelError, UnsupportedTaskError
from carryall.runtime.api.async_llm import AsyncLLM

GREEDY: Any = {"temperature": 0, "ignore_eos": True}


def use(work: Callable[[AsyncClient, AsyncLLM], Awaitable[None]], **options: Any) -> None:
    async def test() -> None:
        async with null_llm(**options) as llm, serving(llm) as served, AsyncClient(served.address) as client:
            await work(client, llm)

    asyncio.run(test())


def test_many_calls_at_once_are_those_made_alone() -> None:
    async def work(client: AsyncClient, llm: AsyncLLM) -> None:
        calls = [{"prompt": f"prompt {n}", "max_tokens": 4 + n, "seed": n} for n in range(6)]
        together = await asyncio.gather(*[client.generate(**call, ignore_eos=True) for call in calls])  # type: ignore[arg-type]
        alone = [await client.generate(**call, ignore_eos=True) for call in calls]  # type: ignore[arg-type]
        assert [reply.text for reply in together] == [reply.text for reply in alone]
        assert [len(reply.first.token_ids) for reply in alone] == [4 + n for n in range(6)]

    use(work)


def test_a_conversation_and_the_other_calls() -> None:
    async def work(client: AsyncClient, llm: AsyncLLM) -> None:
        messages = [{"role": "user", "content": "Hi"}]
        tokens = await client.tokenize(messages)
        assert tokens == llm.encode("[user]Hi", add_special_tokens=False)
        assert await client.detokenize(tokens) == "[user]Hi"
        reply = await client.chat(messages, max_tokens=5, **GREEDY)
        assert reply.text == (await client.generate(tokens, max_tokens=5, **GREEDY)).text
        (score,) = await client.score([("def", " f")])
        assert score.token_ids
        assert len(await client.rerank("q", ["a", "b"], top_n=1)) == 1
        assert [model.name for model in await client.models()] == ["toy"]
        assert (await client.load("toy")).name == "toy"
        assert len(await client.stats("toy")) == 1
        with pytest.raises(UnsupportedTaskError):
            await client.embed(["x"])
        await client.unload("toy")

    use(work)


@pytest.mark.parametrize("how", ["aclose", "cancel"])
def test_an_abandoned_stream_cancels_its_request(how: str) -> None:
    async def work(client: AsyncClient, llm: AsyncLLM) -> None:
        stream = client.stream("x", max_tokens=4000, **GREEDY)
        assert (await anext(stream)).token_ids
        if how == "aclose":
            await stream.aclose()
        else:
            task = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
        async with asyncio.timeout(30):
            while llm.stats().running:
                await asyncio.sleep(0.005)
        assert llm.stats().cancelled == 1

    use(work, step_seconds=0.002)


def test_errors_are_those_of_the_service() -> None:
    async def work(client: AsyncClient, llm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="top_p must be a number"):
            await client.generate("x", top_p=2)
        with pytest.raises(UnknownModelError, match="no model 'no'"):
            await client.tokenize("x", model="no")
        with pytest.raises(CallTimeoutError):
            await client.generate("x", max_tokens=4000, ignore_eos=True, timeout=0.1)

    use(work, step_seconds=0.002)
