"""``latent_kv=compressed``: the cache holds one compressed head, and results stay as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from exporter_golden import NEW_TOKENS, golden_path, prompt
from family_cases import write_case

from carryall import LLM, SamplingParams
from carryall.errors import UsageError
from carryall.providers.base import Row, RunnerInfo
from carryall.providers.native.library import find_library
from carryall.runtime.models.loading import load_model

pytestmark = pytest.mark.skipif(find_library() is None, reason="carryall's kernels are not built")
# Heads of 20 compressed elements (16 and 4 that rotate), in rows of 32; others of 12 in rows of 16.
CASES = ("deepseek_v2", "deepseek_v3", "deepseek_v3-halves", "glm4_moe_lite", "minicpm3", "youtu")
EXPANDED = {"kernels": "carryall", "kv_cache": "float32"}
COMPRESSED = {**EXPANDED, "latent_kv": "compressed"}


def logits_of(model: Path, options: dict[str, Any], *lengths: int) -> tuple[npt.NDArray[Any], RunnerInfo]:
    """Return the logits of all tokens of a prompt, which is run in pieces, and the info of the runner."""
    runner = load_model(str(model), provider_options=options, max_slots=2).runner
    tokens, found, start = prompt()[0][0], [], 0
    try:
        for length in lengths:
            row = Row(0, tokens[start : start + length], start, num_logits=length)
            found.append(runner.forward([row])[0].copy())
            start += length
        return np.concatenate(found), runner.info
    finally:
        runner.close()


@pytest.mark.long
@pytest.mark.parametrize(("isa", "tolerance"), [("portable", 1e-5), ("", 1e-4)])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_expanded_kv(
    case: str, isa: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMX computes attention on heads of 32 elements as pairs of bfloat16, with an error of 2^-17 each."""
    monkeypatch.setenv("CARRYALL_KERNELS_ISA", isa)
    model = write_case(case, tmp_path / "model")
    expected, expanded = logits_of(model, EXPANDED, 14)
    whole, info = logits_of(model, COMPRESSED, 14)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=tolerance * np.abs(expected).max())
    pieces, _ = logits_of(model, COMPRESSED, 5, 1, 1, 7)
    np.testing.assert_array_equal(pieces, whole)
    layers, row = 2, 32 * 4
    assert info.kv_bytes_per_token in (layers * row, layers * 2 * row)  # twice where the kernel holds pairs
    assert (info.kv_bytes_per_token == layers * row) == ("as values" in info.kv_layout)
    assert isa != "portable" or "as values" in info.kv_layout
    assert expanded.kv_bytes_per_token == layers * 2 * 4 * 16 * 4


@pytest.mark.parametrize("case", ["deepseek_v2", "minicpm3", "bailing_hybrid", "kimi_linear"])
def test_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    input_ids, mask = prompt()
    prompts = [row[real == 1].tolist() for row, real in zip(input_ids, mask, strict=True)]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    with LLM(write_case(case, tmp_path / "model"), max_slots=2, provider_options=COMPRESSED) as llm:
        found = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
        again = llm.generate([prompts[0] + found[0][:9]], params)[0].outputs[0].token_ids  # a prefix hit
    with np.load(golden_path(case)) as golden:
        assert found == golden["tokens"].tolist()
    assert again[: NEW_TOKENS - 9] == found[0][9:]


def test_tiers_and_copies_hold_one_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_KERNELS_ISA", "portable")  # AMX would hold pairs of so small heads
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=0)
    text = np.random.default_rng(0).integers(2, 90, 100).tolist()
    model = write_case("minicpm3", tmp_path / "model")
    with LLM(model, max_slots=3, swap_bytes=10**7, provider_options=COMPRESSED) as llm:
        layers, row = 2, 32 * 4
        assert llm.engine.info.kv_bytes_per_token == layers * row
        (first,) = llm.generate([text], params)
        llm.engine.scheduler.cache.clear(save=True)
        while not llm.stats().kv_saved_tokens:
            llm.generate([[3, 4]], params)
        again = llm.generate([text] * 3, params)  # one is restored, the others are copies of it
        assert llm.stats().kv_restored_tokens == 64
    for output in again:
        assert output.outputs[0].token_ids == first.outputs[0].token_ids
        assert output.outputs[0].cumulative_logprob == first.outputs[0].cumulative_logprob


@pytest.mark.long
@pytest.mark.parametrize("method", ["int8-fast", "int4-fast"])
def test_quantized_weights(method: str, tmp_path: Path) -> None:
    model = write_case("minicpm3", tmp_path / "model")
    found = []
    for options in (EXPANDED, COMPRESSED):
        loaded = load_model(str(model), quantize=method, provider_options=options, max_slots=1)
        try:
            row = Row(0, prompt()[0][0], 0, num_logits=14)
            found.append(loaded.runner.forward([row])[0].copy())
        finally:
            loaded.runner.close()
    # Only the products with the keys' and values' weights change: in floats, where others round activations.
    assert np.abs(found[1] - found[0]).max() < 0.1 * np.abs(found[0]).max()


def test_what_has_no_compressed_kv_is_refused(tmp_path: Path) -> None:
    llama = write_case("llama", tmp_path / "llama")
    with pytest.raises(UsageError, match="latent_kv=compressed needs latent attention"):
        LLM(llama, provider_options=COMPRESSED)
    latent = write_case("minicpm3", tmp_path / "latent")
    for others in ({"kernels": "onnxruntime"}, {"kv_memory": "explicit"}):
        with pytest.raises(UsageError, match="needs carryall's kernels and kv_memory=paged"):
            LLM(latent, provider_options={"latent_kv": "compressed", **others})
