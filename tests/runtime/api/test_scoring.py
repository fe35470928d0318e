"""Log-probabilities of given texts, and reranking of documents."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from llm_kit import toy_model

from carryall.errors import RequestError, UsageError
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.api.llm import LLM
from carryall.runtime.api.scoring import RERANK_INSTRUCTION, rerank_questions
from carryall.runtime.types.sampling_params import SamplingParams

TEXT = "a text of some thirty tokens: "


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with LLM(toy_model(tmp_path, context_length=512)) as llm:
        yield llm


def by_hand(llm: LLM, text: str, continuation: str) -> list[float]:
    """Return the log-probability of each token, computed one by one."""
    tokens, result = llm.encode(text + continuation), []
    for place in range(len(llm.encode(text)), len(tokens)):
        params = SamplingParams(max_tokens=1, logprobs=0, logprob_token_ids=(tokens[place],))
        (choices,) = llm.generate(tokens[:place], params)[0].outputs[0].logprobs or []
        result.append(choices[tokens[place]].logprob)
    return result


def test_a_score_is_the_sum_over_the_continuation(llm: LLM) -> None:
    continuations = ["this", "that one", "!"]
    for continuation, score in zip(continuations, llm.score(TEXT, continuations), strict=True):
        assert score.token_logprobs == by_hand(llm, TEXT, continuation)
        assert score.logprob == pytest.approx(math.fsum(score.token_logprobs))
        assert llm.decode(score.token_ids) == continuation
        assert not score.greedy


def test_the_models_own_continuation_is_greedy(tmp_path: Path) -> None:
    with LLM(toy_model(tmp_path, end_token_ids=())) as llm:
        bytes_only = SamplingParams(temperature=0.0, max_tokens=5, allowed_token_ids=tuple(range(97, 123)))
        said = llm.generate(TEXT, bytes_only)[0].outputs[0].text
        (score,) = llm.score(TEXT, said)
        assert score.token_logprobs == by_hand(llm, TEXT, said)
        likeliest = [bool(llm.score(TEXT + said[:i], said[i])[0].greedy) for i in range(len(said))]
        assert score.greedy == all(likeliest)


def test_one_invalid_text_refuses_the_whole_call(tmp_path: Path) -> None:
    async def test() -> None:
        llm = AsyncLLM(toy_model(tmp_path, context_length=512, step_seconds=0.01))
        try:
            with pytest.raises(RequestError, match="context"):
                await llm.score("a", ["b" * 400, "c" * 510])
            while llm.stats().running + llm.stats().waiting:
                await asyncio.sleep(0.002)
            assert llm.stats().cancelled == 1
        finally:
            llm.shutdown()

    asyncio.run(test())


def test_the_text_before_a_continuation_may_be_cached(llm: LLM) -> None:
    llm.score(TEXT, "x")
    before = llm.stats().computed_tokens
    llm.score(TEXT, "yz")
    # The last token of the text runs again to give the first logits.
    assert llm.stats().computed_tokens - before == 3


def test_texts_and_continuations_go_together(llm: LLM) -> None:
    pairs = llm.score(["a", "b"], ["c", "d"])
    assert pairs == [llm.score("a", "c")[0], llm.score("b", "d")[0]]
    with pytest.raises(UsageError, match="2 texts for 3 continuations"):
        llm.score(["a", "b"], ["c", "d", "e"])
    with pytest.raises(RequestError, match="neither may be empty"):
        llm.score("a", "")


def test_a_text_that_is_one_token_with_its_continuation_is_refused(llm: LLM) -> None:
    tokens = {"im": [5], "import os": [7, 8]}
    with (
        patch.object(llm.requests, "token_ids", tokens.__getitem__),
        pytest.raises(RequestError, match="one token with the beginning of its continuation"),
    ):
        llm.score("im", "port os")


def test_documents_are_ranked_by_how_likely_the_first_answer_is(llm: LLM) -> None:
    documents = ["one", "another", "a third"]
    scores = llm.rerank("which?", documents, answers=["y", "n"])
    assert len(set(scores)) == 3
    assert all(0 < score < 1 for score in scores)
    reversed_scores = llm.rerank("which?", documents, answers=["n", "y"])
    assert [a + b for a, b in zip(scores, reversed_scores, strict=True)] == pytest.approx([1.0] * 3)
    with pytest.raises(RequestError, match="must not be empty and must begin with different tokens"):
        llm.rerank("which?", documents, answers=["yes", "yellow"])


def test_the_asynchronous_engine_gives_the_same(llm: LLM, tmp_path: Path) -> None:
    async def run() -> tuple[object, object]:
        other = AsyncLLM(toy_model(tmp_path, context_length=512))
        try:
            scores = await other.score(TEXT, ["this", "that"])
            return scores, await other.rerank("q", ["d", "e"], answers=["y", "n"])
        finally:
            other.shutdown()

    assert asyncio.run(run()) == (
        llm.score(TEXT, ["this", "that"]),
        llm.rerank("q", ["d", "e"], answers=["y", "n"]),
    )


def test_the_query_is_computed_once_for_all_documents(llm: LLM) -> None:
    """The documents stand behind the instruction and the query, whose tokens they share in the radix tree."""
    query, documents = "which of them is it, " * 5, [f"{n} is a document" for n in range(12)]
    asked = rerank_questions(llm.requests, query, documents, RERANK_INSTRUCTION, ["y", "n"]).prompts
    prompts = [llm.requests.token_ids(prompt) for prompt in asked]
    distinct = {tuple(tokens[:end]) for tokens in prompts for end in range(1, len(tokens) + 1)}
    before = llm.stats().computed_tokens
    llm.rerank(query, documents, answers=["y", "n"])
    computed = llm.stats().computed_tokens - before
    assert computed == len(distinct)
    assert computed < 0.4 * sum(map(len, prompts))
