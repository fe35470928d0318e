"""The weights that keep 8 bits where the others get 4, chosen without a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.quantize.recipe import QuantizationRecipe
from carryall.graph_opt.quantize.search.outliers import peak, sensitive_weights

LAYERS = 12


KINDS = {
    "qwen3_5_text": ["linear_attention", "full_attention"] * (LAYERS // 2),
    "gemma3_text": ["sliding_attention", "full_attention"] * (LAYERS // 2),
}


def model(folder: Path, family: str, **changes: Any) -> ir.Model:
    return export_model(write_tiny(family, folder / family, num_hidden_layers=LAYERS, **changes))


def names(graph: ir.Graph) -> list[str]:
    return [str(value.name) for value in sensitive_weights(graph)]


def down(*layers: int) -> set[str]:
    return {f"model.layers.{layer}.mlp.down_proj.weight" for layer in layers}


def ends(*parts: str) -> set[str]:
    return {f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in (0, LAYERS - 1) for part in parts}


def test_keys_and_values_of_grouped_heads_and_both_ends(tmp_path: Path) -> None:
    graph = model(tmp_path, "llama").graph
    attention = {f"model.layers.{i}.self_attn.{kind}_proj.weight" for i in range(LAYERS) for kind in "kv"}
    chosen = names(graph)
    assert attention < set(chosen)
    feed_forward = set(chosen) - attention
    assert ends("gate", "up", "down") < feed_forward
    assert len(feed_forward) == 2 * 2 + LAYERS // 4


def test_a_layer_with_a_super_weight_is_chosen(tmp_path: Path) -> None:
    graph = model(tmp_path, "llama").graph
    value = graph.initializers["model.layers.7.mlp.down_proj.weight"]
    assert value.const_value is not None
    matrix = value.const_value.numpy().copy()
    matrix[3, 5] = 40 * np.abs(matrix).max()
    value.const_value = ir.tensor(matrix, name=value.name)
    assert down(0, 7, LAYERS - 1) == {name for name in names(graph) if "down_proj" in name}


def test_heads_without_groups_and_fused_projections_are_not(tmp_path: Path) -> None:
    equal = model(tmp_path, "llama", num_key_value_heads=4, num_attention_heads=4).graph
    assert {name.split(".")[-2] for name in names(equal)} == {"gate_proj", "up_proj", "down_proj"}
    fused = names(model(tmp_path, "gpt2", n_layer=LAYERS).graph)
    assert len(fused) == 2 + LAYERS // 4
    assert {name.split(".", 3)[-1] for name in fused} == {"mlp.c_fc.weight", "mlp.c_proj.weight"}


@pytest.mark.parametrize("family", ["qwen3_5_text", "gemma3_text", "phi3"])
def test_the_number_does_not_depend_on_the_weights(tmp_path: Path, family: str) -> None:
    changes = {"layer_types": KINDS[family]} if family in KINDS else {}
    graph = model(tmp_path, family, **changes).graph
    by_peak, by_position = sensitive_weights(graph), sensitive_weights(graph, lambda _: 0.0)
    assert len(by_peak) == len(by_position)
    assert len([value for value in by_peak if "down_proj" in str(value.name)]) == LAYERS // 4
    assert not [value for value in by_peak if "o_proj" in str(value.name) or "out_proj" in str(value.name)]


def test_the_experts_of_a_mixture_are_chosen_together(tmp_path: Path) -> None:
    """Kernels compute a layer's experts together only where their weights have one form."""
    graph = model(tmp_path, "qwen3_moe", decoder_sparse_step=1, mlp_only_layers=[]).graph
    value = graph.initializers["model.layers.7.mlp.experts.2.down_proj.weight"]
    assert value.const_value is not None
    matrix = value.const_value.numpy().copy()
    matrix[3, 5] = 40 * np.abs(matrix).max()
    value.const_value = ir.tensor(matrix, name=value.name)
    chosen = [name.split(".") for name in names(graph) if "experts" in name]
    first = [name for name in names(graph) if ".0.mlp.experts." in name]
    assert len(first) == len({name for name in graph.initializers if ".0.mlp.experts." in name})
    chosen = [parts for parts in chosen if parts[-2] == "down_proj"]
    layers = sorted({int(parts[2]) for parts in chosen})
    assert layers == [0, 7, LAYERS - 1]
    count = sum(".7.mlp.experts." in name and "down_proj" in name for name in graph.initializers)
    assert len(chosen) == len(layers) * count > len(layers)


def test_the_peak_of_a_weight() -> None:
    assert peak(ir.tensor(np.array([[3, -3], [3, 3]], np.float32))) == pytest.approx(1)
    assert peak(ir.tensor(np.array([[0, 0], [0, -2]], np.float32))) == pytest.approx(2)
    assert peak(ir.tensor(np.zeros((2, 2), np.float32))) == 0


def test_a_promotion_of_zero_rounds_all_layers_to_4_bits(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "checkpoint")
    stored = {}
    for promote in (None, 0.0):
        recipe = QuantizationRecipe("int4-fast", 16, promote=promote)
        passes, record = recipe.passes(None)
        graph = run(export_model(folder), passes)[0].graph
        assert ("mixed" in record) is (promote is None)
        stored[promote] = {str(value.name): value.dtype for value in graph.initializers.values()}
    layer = "model.layers.0.self_attn.{}_proj.weight.values"
    assert stored[None][layer.format("v")] == ir.DataType.INT8
    assert stored[None][layer.format("q")] == ir.DataType.UINT4
    assert stored[0.0][layer.format("v")] == ir.DataType.UINT4
