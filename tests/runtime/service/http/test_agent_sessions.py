"""A session of a coding agent on a model with recurrent states: each request computes only what is new.

A prefix hit gives the same bits as a cold run: with tools, sub-agents, speculation, preemption and tiers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_sessions import Session, Step, write_hybrid
from http_serving import http_serving

from carryall import LLM, SamplingParams
from carryall.errors import PromptTooLongError
from carryall.providers.native.library import find_library
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.api.requests import ChatPrompt
from carryall.runtime.service.core.chat import Conversation
from carryall.runtime.service.http.anthropic import read_body
from carryall.runtime.types.outputs import RequestOutput

pytestmark = pytest.mark.skipif(find_library() is None, reason="carryall's kernels are not built")

# Texts of different conversations may begin alike behind what the template writes.
CHANCE = 16
ANSWER = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model, or the trained one of the folder ``CARRYALL_TRAINED_HYBRID``."""
    if folder := os.environ.get("CARRYALL_TRAINED_HYBRID"):
        return Path(folder)
    return write_hybrid(tmp_path_factory.mktemp("hybrid") / "checkpoint")


def rendered(llm: LLM | AsyncLLM, step: Step) -> ChatPrompt:
    """The prompt of a request, as the service renders it."""
    prompt = read_body({**step.body, "max_tokens": 1}, {}).prompt
    assert isinstance(prompt, Conversation)
    tools = prompt.tools or None
    return llm.requests.chat_prompt([*prompt.turns()], tools=tools, **prompt.variables)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    size = min(len(first), len(second))
    differs = np.array(first[:size]) != np.array(second[:size])
    return int(differs.argmax()) if differs.any() else size


def test_a_session_has_what_agents_send(hybrid: Path) -> None:
    """The test below could not fail on a session without these."""
    steps = [*Session(1, 0.02).steps()]
    checksums = {step.body["system"][0]["text"].rpartition("cch=")[2] for step in steps}
    assert len(checksums) == len({step.conversation for step in steps}) == 8
    assert sum(step.rewrites for step in steps) == 2
    with LLM(hybrid, max_slots=1) as llm:
        prompts = {step.conversation: rendered(llm, step).token_ids for step in steps}
        for step, former in zip(steps[1:], steps, strict=False):
            tokens, before = rendered(llm, step).token_ids, rendered(llm, former).token_ids
            if step.conversation == former.conversation and not step.rewrites:
                assert common(tokens, before) == len(before)
            if step.rewrites:
                assert common(tokens, before) < len(before) - 100
        assert 100 < common(prompts["agent 0.0"], prompts["agent 2.1"]) < len(prompts["agent 0.0"]) - 100


@pytest.mark.parametrize(
    "scale", [pytest.param(0.02, marks=pytest.mark.long), pytest.param(1.0, marks=pytest.mark.slow)]
)
def test_each_request_computes_what_is_new(scale: float, hybrid: Path) -> None:
    steps = [*Session(1, scale).steps()]

    async def scenario() -> None:
        llm = AsyncLLM(hybrid, max_slots=8)
        known: list[list[int]] = []
        async with http_serving(llm) as served:
            served.client.timeout = 600
            for step in [*steps, steps[-1]]:  # the last one is sent twice
                prompt = rendered(llm, step).token_ids
                before = llm.engine.stats()
                answer = await served.post("/v1/messages", model="toy", max_tokens=4, **step.body)
                assert answer.status_code == 200, answer.text
                usage, after = answer.json()["usage"], llm.engine.stats()
                cached = usage["cache_read_input_tokens"]
                assert usage["input_tokens"] + cached == len(prompt)
                computed = after.computed_tokens - before.computed_tokens
                assert computed == len(prompt) - cached + usage["output_tokens"] - 1
                old = max((common(prompt, other) for other in known), default=0)
                # A state at the end of a prompt is that before its last token.
                assert old - 1 - CHANCE <= cached <= old
                known.append(prompt)
            if scale == 1.0:
                assert 50_000 < max(map(len, known)) < 70_000
        llm.shutdown()

    asyncio.run(scenario())


def told(outputs: Sequence[RequestOutput]) -> list[Any]:
    """The tokens of answers and the bits of their log-probabilities."""
    assert all(len(output.outputs[0].token_ids) == ANSWER.max_tokens for output in outputs)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def waves(steps: Sequence[Step]) -> list[list[Step]]:
    """The requests by when they are sent: sub-agents at the same time, others after each other."""
    found: list[list[Step]] = []
    for step in steps:
        together = found and {each.conversation for each in found[-1]}
        if (
            together
            and step.conversation.startswith("agent")
            and step.conversation not in together
            and all(name.startswith("agent") for name in together)
        ):
            found[-1].append(step)
        else:
            found.append([step])
    return found


@pytest.fixture(scope="module")
def cold(hybrid: Path) -> list[list[Any]]:
    """The answers of a session, each computed alone without a cache."""
    with LLM(hybrid, max_slots=1, prefix_cache=False) as llm:
        return [
            [told(llm.generate([rendered(llm, step)], ANSWER))[0] for step in wave]
            for wave in waves([*Session(2, 0.02).steps(2)])
        ]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"max_step_tokens": 7}, id="pieces"),
        pytest.param({"speculative": "mtp", "adaptive_speculation": False}, id="head"),
        pytest.param({"speculative": "prompt-lookup", "adaptive_speculation": False}, id="lookup"),
        pytest.param({"max_slots": 2}, id="few-slots"),
    ],
)
def test_each_answer_has_the_bits_of_a_cold_run(
    options: dict[str, Any], hybrid: Path, cold: list[list[Any]]
) -> None:
    with LLM(hybrid, **{"max_slots": 6, **options}) as llm:
        cached = 0
        for wave, expected in zip(waves([*Session(2, 0.02).steps(2)]), cold, strict=True):
            outputs = llm.generate([rendered(llm, step) for step in wave], ANSWER)
            assert told(outputs) == expected
            cached += sum(output.metrics.cached_tokens for output in outputs if output.metrics)
            llm.engine.check_integrity()
        assert cached > 0.5 * llm.stats().prompt_tokens
        assert bool(llm.stats().proposed_tokens) == ("speculative" in options)


@pytest.mark.long
def test_short_memory_and_a_restart_in_mid_session_change_no_bit(
    hybrid: Path, cold: list[list[Any]], tmp_path: Path
) -> None:
    """There is memory for one conversation; after half of the session another process goes on."""
    session = waves([*Session(2, 0.02).steps(2)])
    with LLM(hybrid, max_slots=1) as llm:
        info = llm.engine.info
        longest = max(len(rendered(llm, step).token_ids) for wave in session for step in wave)
    budget = 3 * info.state_bytes + (longest + 20) * info.kv_bytes_per_token
    middle, restored = len(session) // 2, list[int]()
    for part in (slice(0, middle), slice(middle, None)):
        with LLM(hybrid, max_slots=4, kv_bytes=budget, prefix_cache_dir=str(tmp_path / "kv")) as llm:
            for wave, expected in zip(session[part], cold[part], strict=True):
                assert told(llm.generate([rendered(llm, step) for step in wave], ANSWER)) == expected
                llm.engine.check_integrity()
            restored.append(llm.stats().kv_restored_tokens)
    # The files of the first process; what the second one stores and reads again depends on its time.
    assert restored[1] > longest / 2


@pytest.mark.long
def test_a_hit_at_any_cut_of_a_conversation_with_tools_equals_a_cold_run(hybrid: Path) -> None:
    step = [*Session(3, 0.001).steps(1)][-1]
    with LLM(hybrid, max_slots=2, prefix_cache=False) as llm:
        prompt = rendered(llm, step).token_ids
        expected = told(llm.generate([prompt], ANSWER))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with LLM(hybrid, max_slots=3) as llm:
        for cut in range(2, len(prompt), 53):
            llm.engine.scheduler.cache.clear()
            llm.generate([prompt[:cut]], params)
            outputs = llm.generate([prompt], ANSWER)
            assert told(outputs) == expected
            assert outputs[0].metrics is not None
            assert outputs[0].metrics.cached_tokens in (cut, cut - 1)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"speculative": "mtp", "adaptive_speculation": False}])
def test_preemption_at_every_step_of_an_answer_changes_no_bit(options: dict[str, Any], hybrid: Path) -> None:
    step = [*Session(3, 0.001).steps(1)][-1]
    with LLM(hybrid, max_slots=2, prefix_cache=False) as llm:
        prompt = rendered(llm, step)
        expected = told(llm.generate([prompt], ANSWER))
    with LLM(hybrid, max_slots=2, **options) as llm:
        engine, forward = llm.engine, llm.engine.step
        preempted: list[int] = []

        def preempting() -> Any:
            outputs = forward()
            for request in [*engine.scheduler.running]:
                count = len(request.output_token_ids)
                if count and count not in preempted:
                    preempted.append(count)
                    engine.scheduler.preempt(request, keep=len(preempted) % 2 == 1)
            return outputs

        engine.step = preempting  # type: ignore[method-assign]
        assert told(llm.generate([prompt], ANSWER)) == expected
        assert len(preempted) > 5


def test_a_prompt_for_which_there_is_no_memory_is_an_error(hybrid: Path) -> None:
    with LLM(hybrid, max_slots=1) as llm:
        info = llm.engine.info
    with LLM(hybrid, max_slots=2, kv_bytes=2 * info.state_bytes + 64 * info.kv_bytes_per_token) as llm:
        (output,) = llm.generate([[5] * 30], ANSWER)
        assert len(output.outputs[0].token_ids) == ANSWER.max_tokens
        with pytest.raises(PromptTooLongError):
            llm.generate([[5] * 200], ANSWER)
