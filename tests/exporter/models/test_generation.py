"""Every family generates transformers' tokens through the engine, on each provider of this machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exporter_golden import NEW_TOKENS, golden_path, prompt
from family_cases import CASES, GOLDEN_OF, write_case

from carryall import LLM, SamplingParams
from carryall.providers.native.library import find_library

# Attention without a kernel on the CPU: sinks, ALiBi, and a head of 12 elements.
FAST = ("gpt_oss", "bloom", "deepseek_v3")


def check(case: str, provider: str, folder: Path) -> None:
    input_ids, mask = prompt()
    prompts = [row[real == 1].tolist() for row, real in zip(input_ids, mask, strict=True)]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    with LLM(write_case(case, folder), provider=provider, max_slots=2) as llm:
        found = [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]
    with np.load(golden_path(GOLDEN_OF.get(case, case))) as golden:
        assert found == golden["tokens"].tolist()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("case", FAST)
def test_attention_without_a_kernel_runs(case: str, tmp_path: Path) -> None:
    check(case, "cpu", tmp_path / "checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["cpu", "openvino"])
@pytest.mark.parametrize("case", sorted(set(CASES) - {"llama-dynamic", "phi3"}))
def test_greedy_tokens_equal_transformers(case: str, provider: str, tmp_path: Path) -> None:
    """Without the ropes that depend on the length of a run."""
    check(case, provider, tmp_path / "checkpoint")


@pytest.mark.parametrize("memory", ["paged", "slots"])
def test_attention_of_several_operators_runs_with_explicit_kv(memory: str, tmp_path: Path) -> None:
    """The sinks of gpt-oss are operators of their own, so that KV in blocks has no kernel to read it."""
    if memory == "paged" and find_library() is None:
        pytest.skip("the CPU kernels are not built")
    case = write_case("gpt_oss", tmp_path / "checkpoint")
    options = {"kv_memory": memory}
    with LLM(case, max_slots=2, provider_options=options) as llm:
        assert len(llm.generate([[3, 4]], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs) == 1
