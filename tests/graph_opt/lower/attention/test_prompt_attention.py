"""Prompts on an int8 cache: the fp32 kernel on converted values gives the int8 kernel's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.graph_opt.compare.runners import SlotRunner
from carryall.graph_opt.graph.edit import static_size
from carryall.graph_opt.lower.attention.prompt_attention import PromptAttentionPass
from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.pipeline import pipeline
from carryall.graph_opt.quantize.formats.kv_cache import QuantizeKVPass

CONTEXT = 96
RNG = np.random.default_rng(0)
# A window shorter than the prompts, partial rope, no rope.
FAMILIES = ["llama", "mistral", "qwen3", "gemma3_text", "phi3", "gpt2"]


def save(model: ir.Model, path: Path) -> Path:
    ir.save(model, path, external_data=f"{path.name}.data")
    return path


def quantized(family: str, folder: Path, **overrides: Any) -> Path:
    """Return a portable graph whose caches have a different scale for each channel."""
    model = export_model(write_tiny(family, folder / "checkpoint", **overrides))
    caches = [value for value in model.graph.inputs if str(value.name).startswith("past_key_values")]
    scales = {}
    for value in caches:
        channels = (static_size(value, 1) or 0) * (static_size(value, 3) or 0)
        scales[str(value.name)] = RNG.uniform(0.01, 0.03, channels).astype(np.float32)
    return save(pipeline.run(model, [QuantizeKVPass(scales)])[0], folder / "quantized.onnx")


def lowered(path: Path, *, prompts: bool) -> Path:
    passes = slot_passes(SlotOptions(context_length=CONTEXT))
    kept = [pass_ for pass_ in passes if prompts or not isinstance(pass_, PromptAttentionPass)]
    return save(pipeline.run(ir.load(path), kept)[0], path.with_name(f"{prompts}.onnx"))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_results_equal_the_int8_kernel(family: str, tmp_path: Path) -> None:
    path = quantized(family, tmp_path)
    models = [lowered(path, prompts=prompts) for prompts in (False, True)]
    both = [node.op_type for node in ir.load(models[1]).graph]
    assert both.count("If") >= 2
    assert "GroupQueryAttention" not in both
    kernel, mine = (SlotRunner(model, slots=3, max_length=CONTEXT) for model in models)
    # Fresh, on a cache, too short, padded together, single tokens.
    for run in ({0: 30}, {0: 17}, {0: 5}, {1: 20, 2: 30}, {0: 1, 1: 1, 2: 1}, {2: 16}):
        rows = {row: RNG.integers(0, 256, count) for row, count in run.items()}
        left, right = kernel.forward(rows), mine.forward(rows)
        for row in rows:
            # In deeper layers a difference in the last bit may round a key to another level.
            np.testing.assert_allclose(right[row], left[row], atol=1e-2 * np.abs(left[row]).max())
            assert np.abs(right[row] - left[row]).mean() < 1e-4 * np.abs(left[row]).max()
            caches = zip(kernel.cache(row).values(), mine.cache(row).values(), strict=True)
            assert all(np.abs(a.astype(int) - b.astype(int)).max(initial=0) <= 1 for a, b in caches)


def test_one_tensor_of_q_k_and_v_is_refused(tmp_path: Path) -> None:
    model = ir.load(lowered(quantized("llama", tmp_path, head_dim=16), prompts=False))
    report = pipeline.run(model, [PromptAttentionPass()])[1]
    assert report.passes[0].fired == 0
    assert {refusal.reason for _, refusal in report.refusals} == {"q, k and v are not three inputs"}
