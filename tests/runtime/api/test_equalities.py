"""A request gives the same tokens in every way of running it, on every provider available here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.exporter.package_writing import write_package
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.quantize.formats.kv_cache import QuantizeKVPass
from carryall.providers import get_provider
from carryall.runtime.api.llm import LLM
from carryall.runtime.engine.config import EngineConfig
from carryall.runtime.types.sampling_params import SamplingParams

CASES = [
    ("cpu", "float32"),
    ("cpu", "int8"),
    ("openvino", "float32"),
    ("openvino", "int8"),
    ("null", None),
]
RNG = np.random.default_rng(0)
BEGINNING = RNG.integers(0, 256, 70).tolist()
PROMPTS = [
    [*BEGINNING, *RNG.integers(0, 256, 20).tolist()],
    [1, 2, 3, 4] * 6,
    [*BEGINNING, 5],
    RNG.integers(0, 256, 33).tolist(),
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, allowed_token_ids=(1, 2, 3)),
    SamplingParams(seed=3, temperature=0.8, top_p=0.9, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=4, top_k=20, repetition_penalty=1.1, max_tokens=9, ignore_eos=True),
]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model calibrated for an 8-bit KV cache, which an option can switch off."""
    folder = tmp_path_factory.mktemp("equal")
    checkpoint = write_tiny("llama", folder / "checkpoint", head_dim=16)
    names = [f"past_key_values.{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")]
    scales = {name: np.full(32, 0.05, np.float32) for name in names}
    model, _ = run(export_model(checkpoint), [QuantizeKVPass(scales)])
    write_package(model, checkpoint, folder / "package")
    return folder / "package"


@pytest.fixture(scope="module", params=CASES, ids=["-".join(filter(None, case)) for case in CASES])
def options(request: pytest.FixtureRequest, package: Path) -> Iterator[dict[str, Any]]:
    provider, kv_cache = request.param
    reason = get_provider(provider).available()
    if reason is not None:
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARRYALL_CACHE", str(package.parent / "cache"))
        yield {
            "model": package,
            "provider": provider,
            "kv_cache_dtype": kv_cache,
            "max_slots": 4,
            "context_length": 128,
            "num_threads": 1,
        }


@pytest.fixture(scope="module")
def expected(options: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of each prompt run alone, without chunks and without cached prefixes."""
    with LLM(**options, prefix_cache=False) as llm:
        return [tokens(llm, [prompt], [params])[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def tokens(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params)]


@pytest.mark.long
def test_batch_is_single(options: dict[str, Any], expected: list[list[int]]) -> None:
    with LLM(**options, prefix_cache=False) as llm:
        assert tokens(llm, PROMPTS, PARAMS) == expected


def test_chunked_is_whole(options: dict[str, Any], expected: list[list[int]]) -> None:
    with LLM(**options, prefix_cache=False, engine_config=EngineConfig(max_step_tokens=13)) as llm:
        assert tokens(llm, PROMPTS, PARAMS) == expected


@pytest.mark.long
def test_a_prefix_hit_is_a_miss(options: dict[str, Any], expected: list[list[int]]) -> None:
    with LLM(**options) as llm:
        for _ in range(2):
            assert tokens(llm, PROMPTS, PARAMS) == expected
        assert llm.stats().prefix_cached_tokens > 2 * len(BEGINNING)


def test_speculative_is_plain(options: dict[str, Any], expected: list[list[int]]) -> None:
    config = EngineConfig(adaptive_speculation=False)
    with LLM(**options, speculative="prompt-lookup", engine_config=config) as llm:
        assert tokens(llm, PROMPTS, PARAMS) == expected
        assert llm.stats().proposed_tokens > 10


@pytest.mark.long
@pytest.mark.parametrize("swap", [False, True])
def test_preempted_is_undisturbed(options: dict[str, Any], expected: list[list[int]], swap: bool) -> None:
    with LLM(**options) as llm:
        size = llm.engine.info.kv_bytes_per_token
    config = EngineConfig(kv_bytes=128 * size, swap_bytes=4096 * size * swap)
    with LLM(**options, engine_config=config) as llm:
        for order in (slice(None), slice(None, None, -1)):
            assert tokens(llm, PROMPTS[order], PARAMS[order]) == expected[order]
        assert llm.stats().preemptions > 0


@pytest.mark.long
def test_restored_from_disk_is_computed(
    options: dict[str, Any], expected: list[list[int]], tmp_path: Path
) -> None:
    for restored in (False, True):
        with LLM(**options, engine_config=EngineConfig(prefix_cache_dir=tmp_path)) as llm:
            assert tokens(llm, PROMPTS, PARAMS) == expected
            assert (llm.stats().kv_restored_tokens > 0) == restored


def test_stream_is_whole(options: dict[str, Any], expected: list[list[int]]) -> None:
    with LLM(**options) as llm:
        for prompt, params, own in zip(PROMPTS, PARAMS, expected, strict=True):
            *_, last = llm.stream(prompt, params)
            assert last.outputs[0].token_ids == own
