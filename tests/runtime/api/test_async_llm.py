"""AsyncLLM with many concurrent callers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from llm_kit import toy_model

from carryall.errors import (
    EngineClosedError,
    PromptTooLongError,
    ProviderRuntimeError,
    QueueFullError,
    RequestError,
    UsageError,
)
from carryall.providers.base import Row
from carryall.providers.targets.null import NullRunner
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.api.llm import LLM
from carryall.runtime.api.requests import Prompt
from carryall.runtime.engine.engine import EngineConfig
from carryall.runtime.types.outputs import RequestOutput
from carryall.runtime.types.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None)
TIMEOUT = 60


@asynccontextmanager
async def serving(folder: Path, *, max_queue: int | None = None, **options: Any) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(toy_model(folder, **options), engine_config=EngineConfig(max_queue=max_queue))
    try:
        yield llm
    finally:
        await asyncio.to_thread(llm.shutdown)


def run(test: Callable[[], Awaitable[object]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), TIMEOUT)

    asyncio.run(limited())


async def last(llm: AsyncLLM, prompt: Prompt, params: SamplingParams = GREEDY) -> RequestOutput:
    return [output async for output in llm.generate(prompt, params)][-1]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def idle(llm: AsyncLLM) -> None:
    await until(lambda: llm.stats().running + llm.stats().waiting == 0)


def test_many_at_once_get_what_each_gets_alone(tmp_path: Path) -> None:
    prompts = [f"prompt {i}" for i in range(20)]
    expected = [output.outputs[0] for output in LLM(toy_model(tmp_path)).generate(prompts, GREEDY)]

    async def test() -> None:
        async with serving(tmp_path) as llm:
            outputs = await asyncio.gather(*(last(llm, prompt) for prompt in prompts))
            assert [output.outputs[0] for output in outputs] == expected
            assert all(output.finished for output in outputs)

    run(test)


def test_states_only_grow(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, step_seconds=0.01) as llm:
            states = [output.outputs[0].token_ids async for output in llm.generate("p", GREEDY)]
            assert len(states) > 1
            assert all(state == states[-1][: len(state)] for state in states)

    run(test)


def test_a_slow_reader_gets_the_latest_state_and_the_end(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as llm:
            stream = await llm.add_request("p", GREEDY)
            await until(lambda: stream.group.finished and stream._news)
            states = [output async for output in stream]
            assert len(states) == 1
            assert len(states[0].outputs[0].token_ids) == 20

    run(test)


def test_closing_the_generator_frees_the_slot(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, context_length=4000, step_seconds=0.001) as llm:
            async with aclosing(llm.generate("p", ENDLESS)) as outputs:
                async for _ in outputs:
                    break
            await until(lambda: llm.stats().cancelled == 1)
            assert llm.stats().running == 0

    run(test)


def test_cancelling_the_task_frees_the_slot(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, context_length=4000, step_seconds=0.001) as llm:
            task = asyncio.create_task(last(llm, "p", ENDLESS))
            await until(lambda: llm.stats().running > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: llm.stats().cancelled == 1)
            assert llm.stats().running == 0

    run(test)


def test_an_id_in_use_is_refused_and_its_owner_lives_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, step_seconds=0.001) as llm:
            owner = await llm.add_request("p", GREEDY, "same")
            refused = await llm.add_request("q", GREEDY, "same")
            refused.cancel()
            states = [output async for output in owner]
            assert states[-1].outputs[0].finish_reason == "length"
            first = await llm.add_request("p", GREEDY, "one")
            second = await llm.add_request("p", GREEDY, "one")
            with pytest.raises(RequestError, match="'one' is in use"):
                await anext(second)
            first.cancel()

    run(test)


def test_abort_ends_a_request_of_another_reader(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, context_length=4000, step_seconds=0.001) as llm:
            outputs = []
            async for output in llm.generate("p", ENDLESS, "mine"):
                outputs.append(output)
                llm.abort("mine")
                llm.abort("unknown")
            assert outputs[-1].finished
            assert outputs[-1].outputs[0].finish_reason == "cancelled"

    run(test)


def test_bad_requests_fail_alone(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as llm:
            good = asyncio.create_task(last(llm, "p"))
            with pytest.raises(PromptTooLongError):
                await last(llm, "p" * 300)
            with pytest.raises(PromptTooLongError):
                await last(llm, "p" * 20_000)  # tokenized in another thread than the event loop
            assert (await good).finished

    run(test)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"priority": "high"}, "the priority must be a whole number, not 'high'"),
        ({"priority": 0.5}, "the priority must be"),
        ({"timeout": float("nan")}, "the timeout must be a number of seconds, not nan"),
        ({"timeout": -1.0}, "the timeout must be"),
        ({"cache_salt": ["a"]}, "cache_salt must be a string"),
        ({"tenant": {}}, "tenant must be a string"),
        ({"request_id": ["b"]}, "request_id must be a string"),
    ],
)
def test_a_request_that_would_stop_the_engine_is_refused_first(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    async def test() -> None:
        async with serving(tmp_path, max_slots=1) as llm:
            first = asyncio.create_task(last(llm, "first"))
            with pytest.raises(RequestError, match=why):
                await llm.add_request("second", GREEDY, **options)
            assert (await first).finished
            assert (await last(llm, "third")).finished

    run(test)


def test_a_full_queue_refuses_and_recovers(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(
            tmp_path, max_slots=1, max_queue=2, context_length=4000, step_seconds=0.001
        ) as llm:
            streams = [await llm.add_request("p", ENDLESS, str(i)) for i in range(4)]
            with pytest.raises(QueueFullError):
                await anext(streams[3])
            for stream in streams[:3]:
                stream.cancel()
            await idle(llm)
            assert (await last(llm, "p")).finished

    run(test)


def test_priority_decides_who_is_next(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, max_slots=1, step_seconds=0.005) as llm:
            order: list[int] = []

            async def read(priority: int) -> None:
                async for output in llm.generate("p", GREEDY, priority=priority):
                    if output.finished:
                        order.append(priority)

            first = asyncio.create_task(read(9))
            await until(lambda: llm.stats().running > 0)
            await asyncio.gather(first, *(read(priority) for priority in (3, 1, 2)))
            assert order == [9, 1, 2, 3]

    run(test)


def test_a_device_failure_reaches_its_request_only(tmp_path: Path) -> None:
    model = toy_model(tmp_path)
    assert isinstance(model.runner, NullRunner)

    def fail(rows: Sequence[Row]) -> None:
        if any(row.tokens[0] == 7 for row in rows):
            raise ProviderRuntimeError("out of memory")

    model.runner.before_forward = fail

    async def test() -> None:
        llm = AsyncLLM(model)
        one = SamplingParams(temperature=0.0, max_tokens=1)
        good, bad = await asyncio.gather(last(llm, [1, 2], one), last(llm, [7], one))
        assert (good.error, bad.error) == (None, "out of memory")
        llm.shutdown()

    run(test)


def test_shutdown_ends_readers_and_later_requests_with_an_error(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, max_slots=1, context_length=4000, step_seconds=0.001) as llm:
            tasks = [asyncio.create_task(last(llm, "p", ENDLESS)) for _ in range(3)]
            await until(lambda: llm.stats().running > 0)
            await asyncio.to_thread(llm.shutdown)
            for task in tasks:
                with pytest.raises(EngineClosedError, match="was shut down"):
                    await task
            with pytest.raises(EngineClosedError):
                await last(llm, "p")
            llm.abort("whatever")

    run(test)


def test_shutdown_reaches_a_reader_that_has_not_read_the_last_news(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, max_slots=1, context_length=4000, step_seconds=0.001) as llm:
            stream = await llm.add_request("p", ENDLESS)
            await anext(stream)
            count = llm.stats().generated_tokens
            await until(lambda: llm.stats().generated_tokens > count + 50)  # told, and not read
            llm.shutdown()
            with pytest.raises(EngineClosedError, match="was shut down"):
                await anext(stream)

    run(test)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_of_the_engine_s_thread_reaches_every_reader(tmp_path: Path) -> None:
    model = toy_model(tmp_path)
    assert isinstance(model.runner, NullRunner)

    def crash(rows: Sequence[Row]) -> None:
        raise ZeroDivisionError("a bug")

    model.runner.before_forward = crash

    async def test() -> None:
        llm = AsyncLLM(model)
        with pytest.raises(EngineClosedError, match=r"the engine failed: ZeroDivisionError\('a bug'\)"):
            await last(llm, "p")
        llm.shutdown()

    run(test)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # this test forks while threads run
def test_a_forked_process_is_told_that_the_engine_is_not_there(tmp_path: Path) -> None:
    llm = AsyncLLM(toy_model(tmp_path))
    child = os.fork()
    if not child:
        try:
            asyncio.run(asyncio.wait_for(last(llm, "hello"), 5))
        except EngineClosedError as error:
            os._exit("does not survive a fork" not in str(error))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    run(lambda: last(llm, "hello"))
    llm.shutdown()


def test_several_event_loops_share_it(tmp_path: Path) -> None:
    llm = AsyncLLM(toy_model(tmp_path, step_seconds=0.001))
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        results[i] = asyncio.run(last(llm, "same prompt")).outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    llm.shutdown()
    assert results[0] == results[1] == results[2]


def test_requests_of_a_loop_that_is_gone_are_cancelled(tmp_path: Path) -> None:
    llm = AsyncLLM(toy_model(tmp_path, context_length=4000, step_seconds=0.001))

    async def leave_behind() -> None:
        await llm.add_request("p", ENDLESS)

    asyncio.run(leave_behind())
    run(lambda: until(lambda: llm.stats().cancelled == 1))
    llm.shutdown()


def test_chat_prompts_are_token_ids_of_the_template(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as llm:
            prompt = llm.render_chat([{"role": "user", "content": "hi"}])
            assert llm.tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == "<s>[user]hi"
            assert (await last(llm, prompt)).prompt_token_ids == prompt.token_ids
            assert llm.context_length == 256

    run(test)


def test_a_model_without_tokenizer_refuses_texts(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, tokenizer=False) as llm:
            with pytest.raises(UsageError, match="no tokenizer"):
                await last(llm, "text")

    run(test)
