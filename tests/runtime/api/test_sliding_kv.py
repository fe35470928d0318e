"""Layers with a sliding window keep only the KV of their window, and give equal tokens; slots and blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_kit import window_bytes
from tiny_models import write_tiny

from carryall.providers import get_provider
from carryall.runtime.api.llm import LLM
from carryall.runtime.engine.engine import EngineConfig
from carryall.runtime.types.sampling_params import SamplingParams

pytest.importorskip("onnxruntime")

WINDOW = 70
CASES = [("cpu", "mistral"), ("cpu", "gemma3_text"), ("cpu", "gpt_oss"), ("openvino", "mistral")]
ALWAYS = EngineConfig(trim_windows="always")
PROMPT = np.random.default_rng(0).integers(0, 256, 900).tolist()
GREEDY = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def options(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    provider, family = request.param
    reason = get_provider(provider).available()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("sliding")
    changes: dict[str, Any] = {"sliding_window": WINDOW, "max_position_embeddings": 2048}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARRYALL_CACHE", str(folder / "cache"))
        checkpoint = write_tiny(family, folder / "tiny", **changes)
        yield {"model": checkpoint, "provider": provider, "max_slots": 3, "num_threads": 1}


@pytest.fixture(scope="module")
def expected(options: dict[str, Any]) -> list[int]:
    with LLM(**options) as llm:
        return generate(llm, PROMPT)


def generate(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate(prompt, params)[0].outputs[0].token_ids


def record_trims(llm: LLM) -> list[tuple[int, int]]:
    """Return a list that gets (slot, length) of every trim."""
    runner = llm.engine.runner
    trims: list[tuple[int, int]] = []
    trim = runner.trim

    def recording(slot: int, length: int) -> None:
        trims.append((slot, length))
        trim(slot, length)

    runner.trim = recording  # type: ignore[method-assign]
    return trims


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "trims"),
    [(EngineConfig(), False), (EngineConfig(prefix_cache=False), True), (ALWAYS, True)],
    ids=["when_short", "without_prefixes", "always"],
)
def test_trimmed_is_whole(
    options: dict[str, Any], expected: list[int], config: EngineConfig, trims: bool
) -> None:
    with LLM(**options, engine_config=config) as llm:
        info = llm.engine.info
        assert info.sliding_window == WINDOW
        *_, beside_last, _ = llm.stream(PROMPT, GREEDY)
        for output in llm.stream(PROMPT[::-1], GREEDY):
            if len(output.outputs[0].token_ids) == 90:
                books = llm.stats().kv_tokens
                break
        assert beside_last.outputs[0].token_ids == expected[:-1]
        behind = 256 if config.prefix_cache else 512
        each = behind * window_bytes(info) // info.kv_bytes_per_token * trims
        assert books == 989 - each + (999 - each) * config.prefix_cache


@pytest.mark.long
def test_the_next_turn_continues_a_trimmed_slot_and_shorter_texts_begin_anew(
    options: dict[str, Any], expected: list[int]
) -> None:
    next_turn = [*PROMPT, *expected, *PROMPT[:20]]
    shorter = [*PROMPT[:300], *PROMPT[:9]]
    with LLM(**options) as llm:
        wanted = [generate(llm, prompt) for prompt in (next_turn, shorter)]
    with LLM(**options, engine_config=ALWAYS) as llm:
        assert generate(llm, PROMPT) == expected
        assert generate(llm, next_turn) == wanted[0]
        assert llm.stats().prefix_cached_tokens == 999
        assert generate(llm, shorter) == wanted[1]
        assert llm.stats().prefix_cached_tokens == 999


@pytest.mark.long
def test_when_kv_is_short_windows_go_before_requests_do(options: dict[str, Any]) -> None:
    prompts = [PROMPT, PROMPT[::-1]]
    with LLM(**options) as llm:
        wanted = [generate(llm, prompt) for prompt in prompts]
        info = llm.engine.info
    behind = 256 * window_bytes(info) // info.kv_bytes_per_token
    config = EngineConfig(kv_bytes=(1980 - behind) * info.kv_bytes_per_token)
    with LLM(**options, engine_config=config) as llm:
        trimmed = record_trims(llm)
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == wanted
        assert llm.stats().preemptions == 0
        assert trimmed


def test_a_small_pool_of_blocks_goes_further_with_windows(options: dict[str, Any]) -> None:
    if options["provider"] != "openvino":
        pytest.skip("slots have no pool")
    prompts = [PROMPT, PROMPT[::-1]]
    with LLM(**options) as llm:
        wanted = [generate(llm, prompt) for prompt in prompts]
        token_bytes = llm.engine.info.kv_bytes_per_token
    pool = {"kv_cache_bytes": (1728 // 32 + options["max_slots"]) * 32 * token_bytes}
    with LLM(**options, provider_options=pool) as llm:
        assert llm.engine.info.kv_tokens == 1728
        trimmed = record_trims(llm)
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == wanted
        assert llm.stats().preemptions == 0
        assert trimmed


@pytest.mark.long
@pytest.mark.parametrize("swap", [False, True])
def test_a_trimmed_request_may_be_preempted(options: dict[str, Any], expected: list[int], swap: bool) -> None:
    config = EngineConfig(trim_windows="always", swap_bytes=2**28 * swap)
    with LLM(**options, engine_config=config) as llm:
        for output in llm.stream(PROMPT, GREEDY):
            if len(output.outputs[0].token_ids) == 50:
                (request,) = llm.engine.scheduler.running
                llm.engine.scheduler.preempt(request)
                llm.engine.scheduler.cache.clear(save=True)
        assert output.outputs[0].token_ids == expected
        assert (llm.stats().kv_restored_tokens > 800) == swap


@pytest.mark.long
def test_trimmed_kv_is_restored_from_disk(
    options: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    config = EngineConfig(trim_windows="always", prefix_cache_dir=tmp_path)
    for restored in (0, 14 * 64):
        with LLM(**options, engine_config=config) as llm:
            assert generate(llm, PROMPT) == expected
            assert llm.stats().kv_restored_tokens == restored
