"""KV eviction in slots and in blocks, against the portable graph with rows removed from its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Array, Feeds, onnxruntime
from tiny_models import write_tiny

from carryall.exporter.export import export_package
from carryall.exporter.package import Package
from carryall.providers import get_provider
from carryall.runtime.api.llm import LLM
from carryall.runtime.types.sampling_params import SamplingParams

pytest.importorskip("onnxruntime")

PROVIDERS = ["cpu", "openvino"]
KEPT, SINKS, RECENT, MOST = 40, 4, 20, 50
PROMPTS = [np.random.default_rng(n).integers(0, 256, size).tolist() for n, size in enumerate((60, 7, 28))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},  # its rope stays outside of the kernel
    "qwen3": {"head_dim": 16},  # its rope is inside
    "gpt2": {"n_positions": 128},  # positions without a rope
    "mistral": {"head_dim": 16, "sliding_window": 11},  # no loss
}


def keep_best(past: Feeds) -> Feeds:
    """Reduce caches [1, heads, n, size] to the sinks, each head's most distinct keys and the recent keys."""
    kept: Feeds = {}
    for name in [name for name in past if name.endswith(".key")]:
        keys = past[name][0].astype(np.float64)
        size = keys.shape[1]
        for kind in ("key", "value"):
            source = name.replace(".key", f".{kind}")
            heads = []
            for own, rows in zip(keys, past[source][0], strict=True):
                middle = own[SINKS : size - RECENT]
                distances = np.linalg.norm(middle - middle.mean(axis=0), axis=1)
                best = np.sort(np.argsort(-distances)[: KEPT - SINKS - RECENT]) + SINKS
                heads.append(rows[[*range(SINKS), *best, *range(size - RECENT, size)]])
            kept[source] = np.stack(heads)[None]
    return kept


def squeezed(package: Package, prompt: list[int], count: int) -> list[int]:
    """Return the greedy tokens if the cache is reduced whenever it is a quarter over its budget."""
    run, signature = onnxruntime(package.model_path), package.signature
    empty: Array = np.zeros((1, signature.num_kv_heads, 0, signature.head_dim), np.float32)
    kinds = [f"{layer}.{kind}" for layer in range(signature.num_layers) for kind in ("key", "value")]
    past = {f"past_key_values.{kind}": empty for kind in kinds}
    output: list[int] = []
    while len(output) < count:
        given = output[-1:] or prompt
        held = past[f"past_key_values.{kinds[0]}"].shape[2]
        if output and held >= MOST:
            past, held = keep_best(past), KEPT
        end = len(prompt) + len(output)
        logits, *present = run(
            {
                "input_ids": np.array([given]),
                "attention_mask": np.ones((1, held + len(given)), np.int64),
                "position_ids": np.arange(end - len(given), end)[None],
                **past,
            }
        )
        past = dict(zip(past, present, strict=True))
        output.append(int(logits[0, -1].argmax()))
    return output


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    reason = get_provider(request.param).available()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    return str(request.param)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_keeps_what_the_rule_says(family: str, provider: str, tmp_path: Path) -> None:
    checkpoint = write_tiny(family, tmp_path / "tiny", **FAMILIES[family])
    package = export_package(checkpoint, tmp_path / "package")
    expected = [squeezed(package, prompt, 30) for prompt in PROMPTS]
    options: dict[str, Any] = {"provider": provider, "max_slots": 2, "num_threads": 1}
    with LLM(checkpoint, kv_eviction_tokens=KEPT, **options) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
    with LLM(checkpoint, **options) as llm:
        whole = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    assert (whole == expected) == (family == "mistral")
