"""Every family generates transformers' tokens through the engine, on each provider of this machine."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from exporter_golden import NEW_TOKENS, golden_path, prompt
from family_cases import CASES, GOLDEN_OF, write_case

from carryall import LLM, SamplingParams
from carryall.providers.native.library import find_library

# Attention without a kernel in onnxruntime: ALiBi, and a head of 12 elements.
FAST = ("bloom", "deepseek_v3")


def check(case: str, provider: str, folder: Path, options: dict[str, str] | None = None) -> None:
    input_ids, mask = prompt()
    prompts = [row[real == 1].tolist() for row, real in zip(input_ids, mask, strict=True)]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    model = write_case(case, folder)
    with LLM(model, provider=provider, max_slots=2, provider_options=options or {}) as llm:
        found = [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]
    with np.load(golden_path(GOLDEN_OF.get(case, case))) as golden:
        assert found == golden["tokens"].tolist()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("case", FAST)
def test_attention_without_a_kernel_of_onnxruntime_runs(case: str, tmp_path: Path) -> None:
    check(case, "cpu", tmp_path / "checkpoint")


@pytest.mark.parametrize("provider", ["cpu", "openvino"])
def test_alibi_runs_in_kernels(provider: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if provider == "cpu" and find_library() is None:
        pytest.skip("the CPU kernels are not built")
    with caplog.at_level(logging.WARNING, "carryall"):
        check("falcon-alibi-sequential", provider, tmp_path / "checkpoint")
    assert not [record for record in caplog.records if "slower" in record.getMessage()]


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["cpu", "openvino"])
@pytest.mark.parametrize("case", sorted(set(CASES) - {"llama-dynamic", "phi3"}))
def test_greedy_tokens_equal_transformers(case: str, provider: str, tmp_path: Path) -> None:
    """Without the ropes that depend on the length of a run."""
    check(case, provider, tmp_path / "checkpoint")


def test_layers_that_share_a_cache_run_in_kernels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if find_library() is None:
        pytest.skip("the CPU kernels are not built")
    with caplog.at_level(logging.WARNING, "carryall"):
        check("gemma4_text", "cpu", tmp_path / "checkpoint")
    assert not [record for record in caplog.records if "one by one" in record.getMessage()]


def test_layers_that_share_a_cache_run_without_kernels_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "carryall"):
        check("gemma4_text", "cpu", tmp_path / "checkpoint", {"kv_memory": "explicit"})
    assert len([record for record in caplog.records if "one by one" in record.getMessage()]) == 1


def test_attention_with_sinks_runs_in_kernels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if find_library() is None:
        pytest.skip("the CPU kernels are not built")
    with caplog.at_level(logging.WARNING, "carryall"):
        check("gpt_oss", "cpu", tmp_path / "checkpoint")
    assert not [record for record in caplog.records if "one by one" in record.getMessage()]
