"""Equal results on the CPU through every layer: checkpoint, package, lowered graph, runner, engine, text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_tiny

from carryall.runtime.api.llm import LLM
from carryall.runtime.engine.engine import EngineConfig
from carryall.runtime.types.outputs import RequestOutput
from carryall.runtime.types.sampling_params import SamplingParams

pytest.importorskip("onnxruntime")

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=16, seed=11, top_k=30, repetition_penalty=1.1, ignore_eos=True)
PARAMS = [GREEDY, RANDOM] * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("cpu") / "tiny")


@pytest.fixture(autouse=True)
def shared_cache(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(checkpoint.parent / "cache"))


@pytest.fixture
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, size).tolist() for size in (1, 30, 7, 64, 2, 45, 12, 3)]


@pytest.fixture
def alone(checkpoint: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return the output of each request run alone, without chunked prefill."""
    with LLM(checkpoint, max_slots=1, num_threads=1, prefix_cache=False) as llm:
        singles = [llm.generate(prompt, params) for prompt, params in zip(prompts, PARAMS, strict=True)]
    return [tokens(single)[0] for single in singles]


@pytest.fixture
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, max_slots=4, num_threads=1) as llm:
        yield llm


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_batch_equals_single(llm: LLM, prompts: list[list[int]], alone: list[list[int]]) -> None:
    assert len({tuple(ids) for ids in alone}) == len(alone)
    assert tokens(llm.generate(prompts, PARAMS)) == alone
    assert tokens(llm.generate(prompts[::-1], PARAMS[::-1])) == alone[::-1]


def test_chunked_equals_whole(checkpoint: Path, prompts: list[list[int]], alone: list[list[int]]) -> None:
    config = EngineConfig(max_step_tokens=5)
    with LLM(checkpoint, max_slots=4, num_threads=1, engine_config=config) as llm:
        assert tokens(llm.generate(prompts, PARAMS)) == alone


def test_preempted_equals_undisturbed(
    checkpoint: Path, llm: LLM, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    bytes_per_token = llm.engine.info.kv_bytes_per_token
    config = EngineConfig(kv_bytes=100 * bytes_per_token)
    with LLM(checkpoint, max_slots=4, num_threads=1, engine_config=config) as small:
        assert tokens(small.generate(prompts, PARAMS)) == alone
        assert small.stats().preemptions > 0


def test_stream_equals_whole(llm: LLM, prompts: list[list[int]]) -> None:
    (whole,) = llm.generate(prompts[1], RANDOM)
    assert list(llm.stream(prompts[1], RANDOM))[-1].outputs == whole.outputs


def test_gaps_between_slots_change_nothing(
    llm: LLM, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    short = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate([[1], prompts[1], [3], prompts[3]], [short, RANDOM, short, RANDOM])
    assert [tokens(outputs)[1], tokens(outputs)[3]] == [alone[1], alone[3]]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_hit_equals_miss(family: str, prompts: list[list[int]], tmp_path: Path) -> None:
    """Also with a sliding window of 5 tokens: the cache keeps all positions."""
    model = write_tiny(family, tmp_path / "tiny")
    longer = [[*prompts[3][:50], i, i + 1] for i in range(5)]
    with (
        LLM(model, max_slots=4, num_threads=1) as llm,
        LLM(model, max_slots=4, num_threads=1, prefix_cache=False) as plain,
    ):
        for asked in (prompts[3:4], [*longer, prompts[3]], longer):
            hits = llm.generate(asked, GREEDY)
            assert tokens(hits) == tokens(plain.generate(asked, GREEDY))
        assert sum(hit.metrics.cached_tokens >= 50 for hit in hits if hit.metrics) == 5
        assert plain.stats().prefix_queries == 0


def test_idle_slots_between_running_ones_keep_their_content(
    llm: LLM, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    short = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm.generate([[1] * 9, prompts[3], [3] * 9, [4] * 9], [GREEDY, short, GREEDY, GREEDY])
    # Slot 1 was idle for 15 steps, and each step ran a dummy row in it.
    (hit,) = llm.generate(prompts[3], PARAMS[3])
    assert hit.metrics is not None
    assert hit.metrics.cached_tokens == 63
    assert tokens([hit]) == [alone[3]]


def test_text_end_token_and_chat(llm: LLM) -> None:
    (output,) = llm.generate("hello", GREEDY)
    assert output.outputs[0].text == llm.decode(output.outputs[0].token_ids)
    (answer,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert llm.decode(answer.prompt_token_ids) == "[user]hi[assistant]"
    params = SamplingParams(seed=1, temperature=3.0, max_tokens=None)
    (long,) = llm.generate("hello", params)
    assert long.outputs[0].finish_reason in ("stop", "length")


def test_int4_runs_and_is_deterministic(checkpoint: Path, tmp_path: Path) -> None:
    source = write_tiny("llama", tmp_path / "wide", hidden_size=128, intermediate_size=128)
    with LLM(source, quantize="int4-fast", max_slots=2, num_threads=1) as llm:
        first = tokens(llm.generate(["one", "two"], GREEDY))
        assert first == tokens(llm.generate(["one", "two"], GREEDY))
