"""KV restored from disk equals computed KV, and preemption changes no token, on every provider here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import write_tiny

from carryall.providers import get_provider
from carryall.runtime.api.llm import LLM
from carryall.runtime.engine.engine import EngineConfig
from carryall.runtime.types.outputs import RequestOutput
from carryall.runtime.types.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = np.random.default_rng(0).integers(0, 256, 100).tolist()


CASES = [("llama", "cpu"), ("gemma3_text", "cpu"), ("llama", "openvino")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    family, provider = request.param
    reason = get_provider(provider).available()
    if reason is not None:
        pytest.skip(reason)
    return write_tiny(family, tmp_path_factory.mktemp("tiers") / "tiny"), provider


@pytest.fixture
def options(case: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("CARRYALL_CACHE", str(case[0].parent / "cache"))
    return {"model": case[0], "provider": case[1], "max_slots": 2, "num_threads": 1}


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.long
def test_restored_from_disk_equals_computed(options: dict[str, Any], tmp_path: Path) -> None:
    def generate() -> tuple[list[list[int]], int]:
        config = EngineConfig(prefix_cache_dir=tmp_path)
        with LLM(**options, engine_config=config) as llm:
            return tokens(llm.generate(PROMPT, GREEDY)), llm.stats().kv_restored_tokens

    computed, nothing = generate()
    restored, length = generate()
    assert (nothing, length) == (0, 64)
    assert restored == computed
    (path,) = tmp_path.glob("??/*.kv")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert generate() == (computed, 0)
    assert generate() == (computed, 64)


def test_preempted_equals_undisturbed(options: dict[str, Any]) -> None:
    prompts = [np.random.default_rng(n).integers(0, 256, 80).tolist() for n in range(2)]

    with LLM(**options) as llm:
        undisturbed = tokens(llm.generate(prompts, GREEDY))
        assert llm.stats().preemptions == 0
        size = llm.stats().kv_bytes // llm.stats().kv_tokens
    config = EngineConfig(kv_bytes=170 * size, swap_bytes=1000 * size)
    with LLM(**options, engine_config=config) as llm:
        assert tokens(llm.generate(prompts, GREEDY)) == undisturbed
        assert (llm.stats().preemptions, llm.stats().kv_restored_tokens) == (1, 64)
