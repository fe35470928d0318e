"""A trained hybrid tells what stands far back, and does so with everything that may lose it.

The network of ``tests/corpora/recall_hybrid`` has a layer of the gated delta rule and one of attention
(``tools/train_recall_model.py``). A text states values of six keys, with other tokens behind them; a question
is a key, and the answer its value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recall_texts import recall_text

from carryall.errors import UsageError
from carryall.providers.base import Row
from carryall.providers.native.library import find_library
from carryall.runtime.api.llm import LLM
from carryall.runtime.types.outputs import RequestOutput
from carryall.runtime.types.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(find_library() is None, reason="carryall's kernels are not built")
MODEL = Path(__file__).parents[2] / "corpora" / "recall_hybrid"
TEXTS, PAIRS, BETWEEN = 8, 6, 150
ANSWER = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def texts() -> list[tuple[list[int], dict[int, int]]]:
    return [recall_text(seed, PAIRS, BETWEEN) for seed in range(TEXTS)]


def questions(texts: Sequence[tuple[list[int], dict[int, int]]]) -> list[list[int]]:
    return [[*text, key] for text, values in texts for key in values]


def told(outputs: Sequence[RequestOutput]) -> list[Any]:
    """The answers with the bits of their log-probabilities."""
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def right(answers: Sequence[Sequence[int]], texts: Sequence[tuple[list[int], dict[int, int]]]) -> float:
    expected = [value for _, values in texts for value in values.values()]
    return float(np.mean([answer[0] == value for answer, value in zip(answers, expected, strict=True)]))


@pytest.fixture(scope="module")
def cold(texts: list[tuple[list[int], dict[int, int]]]) -> Iterator[list[Any]]:
    """The answers to all questions, each computed alone."""
    with LLM(MODEL, max_slots=1, prefix_cache=False) as llm:
        yield [told(llm.generate([question], ANSWER))[0] for question in questions(texts)]


@pytest.mark.long
def test_what_stands_far_back_is_recalled(
    texts: list[tuple[list[int], dict[int, int]]], cold: list[Any]
) -> None:
    assert right([tokens for tokens, _ in cold], texts) > 0.95


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="hits"),
        pytest.param({"max_step_tokens": 7}, id="pieces"),
        pytest.param({"max_slots": 2}, id="few-slots"),
        pytest.param({"speculative": "prompt-lookup", "adaptive_speculation": False}, id="speculation"),
    ],
)
def test_the_answers_have_the_bits_of_cold_runs(
    options: dict[str, Any], texts: list[tuple[list[int], dict[int, int]]], cold: list[Any]
) -> None:
    with LLM(MODEL, **{"max_slots": 4, **options}) as llm:
        outputs = [llm.generate([question], ANSWER)[0] for question in questions(texts)]
        hits = [output.metrics.cached_tokens for output in outputs if output.metrics]
    assert told(outputs) == cold
    # At the second question a state is kept where it parts from the first; all others begin with it.
    assert [hits[i] for i in range(len(hits)) if i % PAIRS >= 2] == [1 + 2 * PAIRS + BETWEEN] * TEXTS * (
        PAIRS - 2
    )


@pytest.mark.long
def test_preempted_texts_have_the_bits_of_cold_runs(texts: list[tuple[list[int], dict[int, int]]]) -> None:
    """Four texts of 164 and 150 tokens want more than the memory, which holds states and 400 tokens."""
    asked = questions(texts)[::PAIRS]
    params = dataclasses.replace(ANSWER, max_tokens=150)
    with LLM(MODEL, max_slots=1, prefix_cache=False) as llm:
        alone = [told(llm.generate([question], params))[0] for question in asked]
        info = llm.engine.info
    budget = 4 * info.state_bytes + 400 * info.kv_bytes_per_token
    with LLM(MODEL, max_slots=4, kv_bytes=budget) as llm:
        assert told(llm.generate(asked, params)) == alone
        assert llm.stats().preemptions >= 4
        llm.engine.check_integrity()
    assert right(
        [tokens for tokens, _ in alone], [(text, dict([*values.items()][:1])) for text, values in texts]
    )


@pytest.mark.long
def test_states_of_bfloat16_recall_as_much_with_the_bits_of_cold_runs(
    texts: list[tuple[list[int], dict[int, int]]], cold: list[Any]
) -> None:
    options: dict[str, Any] = {"provider_options": {"state_cache": "bfloat16"}, "max_slots": 4}
    with LLM(MODEL, prefix_cache=False, **options) as llm:
        halves = [told(llm.generate([question], ANSWER))[0] for question in questions(texts)]
        size = llm.engine.info.state_bytes
    with LLM(MODEL, max_step_tokens=7, **options) as llm:
        outputs = [llm.generate([question], ANSWER)[0] for question in questions(texts)]
        assert llm.stats().prefix_cached_tokens > 0
    assert told(outputs) == halves != cold
    assert right([tokens for tokens, _ in halves], texts) > 0.95
    with LLM(MODEL, max_slots=1) as llm:
        # Of each head 32 * 32 elements of the state; a token beside it and the convolution stay float32.
        assert llm.engine.info.state_bytes - size == 2 * 2 * 32 * 32


def test_states_of_bfloat16_need_the_kernels() -> None:
    options = {"state_cache": "bfloat16", "kv_memory": "explicit"}
    with pytest.raises(UsageError, match="bfloat16 states need carryall's CPU kernels"):
        LLM(MODEL, max_slots=1, provider_options=options)


@pytest.mark.long
def test_a_text_from_disk_is_remembered(
    texts: list[tuple[list[int], dict[int, int]]], cold: list[Any], tmp_path: Path
) -> None:
    for part in range(2):
        with LLM(MODEL, max_slots=2, prefix_cache_dir=str(tmp_path)) as llm:
            outputs = [llm.generate([question], ANSWER)[0] for question in questions(texts)[part::PAIRS]]
            assert (llm.stats().kv_restored_tokens >= 128) == (part == 1)
        assert told(outputs) == cold[part::PAIRS]


@pytest.mark.long
def test_without_its_states_it_forgets(texts: list[tuple[list[int], dict[int, int]]]) -> None:
    """So the other tests see a loss of states; keys and values of attention take no part in the answers."""
    with LLM(MODEL, max_slots=2) as llm:
        runner, answers = llm.engine.runner, []
        for text, values in texts:
            for key in values:
                runner.forward([Row(0, np.array(text, np.int64), 0, 1)])
                states = runner.read_state(0, len(text))
                runner.write_state(0, len(text), [np.zeros_like(part) for part in states])
                row = Row(0, np.array([key], np.int64), len(text), 1)
                answers.append([int(runner.forward([row])[0][0].argmax())])
                runner.release(0)
    assert right(answers, texts) < 0.6
