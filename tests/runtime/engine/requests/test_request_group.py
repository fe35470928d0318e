"""Several samples of one prompt are separate requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm_kit import toy_model

from carryall.errors import InvalidSamplingError, RequestError
from carryall.providers.targets.null import NullRunner
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.api.llm import LLM
from carryall.runtime.engine.engine import EngineConfig
from carryall.runtime.models.loading import LoadedModel
from carryall.runtime.types.outputs import RequestOutput
from carryall.runtime.types.sampling_params import SamplingParams

PROMPT = "a prompt of some thirty tokens"
SAMPLERS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"mirostat": 2, "mirostat_tau": 3.0},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05, "min_p": 0.01},
    {"typical_p": 0.7, "repetition_penalty": 1.2, "logprobs": 2},
]


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    return toy_model(tmp_path)


@pytest.fixture
def llm(model: LoadedModel) -> Iterator[LLM]:
    with LLM(model) as llm:
        yield llm


def texts(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: next(iter(sampler)))
def test_samples_are_separate_requests_whose_seeds_count_up(llm: LLM, sampler: dict[str, Any]) -> None:
    """More samples than slots, so some wait, and another request runs at the same time."""
    (several, _) = llm.generate(
        [PROMPT, "other"],
        [SamplingParams(n=6, seed=5, max_tokens=9, **sampler), SamplingParams(seed=1, max_tokens=30)],
    )
    assert [completion.index for completion in several.outputs] == list(range(6))
    for i, completion in enumerate(several.outputs):
        (one,) = llm.generate(PROMPT, SamplingParams(seed=5 + i, max_tokens=9, **sampler))
        assert completion.token_ids == one.outputs[0].token_ids
        assert completion.logprobs == one.outputs[0].logprobs


def test_the_prompt_is_computed_once(model: LoadedModel) -> None:
    with LLM(model) as llm:
        llm.generate(PROMPT, SamplingParams(n=4, seed=0, max_tokens=1))
        # The last prompt token runs for each sample, because it gives the first logits.
        assert llm.stats().computed_tokens == len(llm.encode(PROMPT)) + 3


def test_best_of_returns_the_most_likely(llm: LLM) -> None:
    every = SamplingParams(n=5, seed=3, max_tokens=8, logprobs=0)
    (output,) = llm.generate(PROMPT, every)

    def mean(position: int) -> float:
        completion = output.outputs[position]
        assert completion.cumulative_logprob is not None
        return completion.cumulative_logprob / len(completion.token_ids)

    best = sorted(range(5), key=mean, reverse=True)[:2]
    (chosen,) = llm.generate(PROMPT, SamplingParams(n=2, best_of=5, seed=3, max_tokens=8))
    assert texts(chosen) == [texts(output)[i] for i in best]
    assert [completion.index for completion in chosen.outputs] == [0, 1]
    assert chosen.outputs[0].logprobs is None


def test_a_stream_grows_all_samples_and_ends_as_the_whole(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=8, max_tokens=6)
    states = list(llm.stream(PROMPT, params))
    assert texts(states[-1]) == texts(llm.generate(PROMPT, params)[0])
    for before, after in itertools.pairwise(states):
        for old, new in zip(texts(before), texts(after), strict=True):
            assert new[: len(old)] == old
    assert [state.finished for state in states] == [False] * (len(states) - 1) + [True]


def test_the_asynchronous_engine_gives_the_same(tmp_path: Path) -> None:
    model = toy_model(tmp_path, step_seconds=0.002)  # so that the abort comes before the end
    params = SamplingParams(n=3, seed=8, max_tokens=6)

    async def run() -> tuple[RequestOutput, RequestOutput]:
        llm = AsyncLLM(model)
        try:
            last = [state async for state in llm.generate(PROMPT, params, "a")][-1]
            long = SamplingParams(n=3, max_tokens=None, ignore_eos=True)
            stream = await llm.add_request(PROMPT, long, "b")
            await anext(stream)
            with pytest.raises(RequestError, match="'b' is in use"):
                await anext(await llm.add_request("x", None, "b"))
            llm.abort("b")
            cut = [state async for state in stream][-1]
            assert llm.stats().running == 0
            return last, cut
        finally:
            llm.shutdown()

    last, cut = asyncio.run(run())
    with LLM(toy_model(tmp_path)) as llm:
        assert texts(last) == texts(llm.generate(PROMPT, params)[0])
    assert {completion.finish_reason for completion in cut.outputs} == {"cancelled"}


def test_fewer_are_returned_than_generated() -> None:
    with pytest.raises(InvalidSamplingError, match="best_of 2 is less than n 3"):
        SamplingParams(n=3, best_of=2)


@pytest.mark.parametrize("most_tokens", [5, 512])
def test_prompt_logprobs_are_those_of_generating_the_prompt(tmp_path: Path, most_tokens: int) -> None:
    """Log-probabilities of prompt tokens equal those of generating them, with or without chunked prefill."""
    with LLM(toy_model(tmp_path), engine_config=EngineConfig(max_step_tokens=most_tokens)) as llm:
        llm.generate(PROMPT, SamplingParams(max_tokens=1))  # no entries are missing for a cached prefix
        (output,) = llm.generate(PROMPT, SamplingParams(n=2, prompt_logprobs=3, max_tokens=2, seed=1))
        assert output.prompt_logprobs is not None
        ids = output.prompt_token_ids
        assert len(output.prompt_logprobs) == len(ids)
        assert output.prompt_logprobs[0] is None
        for place in range(1, len(ids)):
            found = output.prompt_logprobs[place]
            params = SamplingParams(
                temperature=0.0, max_tokens=1, logprobs=3, logprob_token_ids=(ids[place],)
            )
            (after,) = llm.generate(ids[:place], params)
            assert after.outputs[0].logprobs is not None
            assert found == {token: after.outputs[0].logprobs[0][token] for token in found or {}}
            assert ids[place] in (found or {})
        plain = llm.generate(PROMPT, SamplingParams(n=2, max_tokens=2, seed=1))[0]
        assert texts(output) == texts(plain)


def test_prompt_logprobs_of_a_preempted_request(tmp_path: Path) -> None:
    model = toy_model(tmp_path)
    assert isinstance(model.runner, NullRunner)
    budget = 50 * model.runner.info.kv_bytes_per_token
    params = SamplingParams(prompt_logprobs=0, max_tokens=15, ignore_eos=True, seed=0)
    prompts = [np.arange(n, n + 15).tolist() for n in (1, 50, 100)]
    with LLM(model, engine_config=EngineConfig(kv_bytes=budget)) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.stats().preemptions > 0
    with LLM(toy_model(tmp_path)) as llm:
        for output, prompt in zip(outputs, prompts, strict=True):
            (alone,) = llm.generate([prompt], params)
            assert (output.prompt_logprobs, texts(output)) == (alone.prompt_logprobs, texts(alone))
