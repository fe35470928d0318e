"""The paged lowering: inputs, attention, windows, weights, and refused graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from graph_asserts import evaluate
from tiny_models import write_tiny

from carryall.errors import GraphError
from carryall.exporter.export import export_package
from carryall.graph_opt.graph.edit import insert, nodes_of, replace, shared_constant, weight
from carryall.graph_opt.lower.outputs.logits import SelectLogitsPass
from carryall.graph_opt.lower.pipelines.paged import (
    FlatLogitsPass,
    PagedAttentionPass,
    PagedInputsPass,
    paged_passes,
)
from carryall.graph_opt.lower.pipelines.paged_form import DOMAIN, OPERATOR, PLAIN, TABLES
from carryall.graph_opt.lower.products.arithmetic_dequantize import ArithmeticDequantizePass
from carryall.graph_opt.pipeline.pipeline import run

CONTEXT = 64


def portable(family: str, folder: Path) -> ir.Model:
    return export_package(write_tiny(family, folder / "checkpoint"), folder / "package").load()


def lowered(family: str, folder: Path) -> ir.Model:
    return run(portable(family, folder), paged_passes(CONTEXT))[0]


def test_the_graph_takes_one_flat_batch_and_block_tables(tmp_path: Path) -> None:
    model = lowered("llama", tmp_path)
    names = {value.name for value in model.graph.inputs}
    caches = {f"past_key_values.{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")}
    assert names == {"input_ids", "position_ids", "logits_positions", *TABLES, *caches}
    assert [value.name for value in model.graph.outputs] == ["logits"]
    assert model.metadata_props["context_length"] == str(CONTEXT)


def test_windows_and_sizes_become_attributes(tmp_path: Path) -> None:
    nodes = list(nodes_of(lowered("gemma3_text", tmp_path).graph, OPERATOR, DOMAIN))
    assert [node.attributes["local_window_size"].as_int() for node in nodes] == [5, -1, 5]
    first = {name: attribute.value for name, attribute in nodes[0].attributes.items()}
    assert (first["num_heads"], first["kv_num_heads"]) == (4, 2)
    assert first["scale"] == pytest.approx(12**-0.5)


def test_slopes_of_alibi_become_an_input(tmp_path: Path) -> None:
    """4 heads have the slopes 2^-2, 2^-4, 2^-6 and 2^-8 (https://arxiv.org/abs/2108.12409)."""
    model = lowered("bloom", tmp_path)
    assert not {"attention_mask"} & {value.name for value in model.graph.inputs}
    (slopes,) = {node.inputs[PLAIN.slopes] for node in nodes_of(model.graph, OPERATOR, DOMAIN)}
    assert slopes is not None
    tensor = weight(slopes)
    assert tensor is not None
    np.testing.assert_allclose(tensor.numpy(), [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], rtol=1e-6)


def test_no_shape_is_read_from_activations(tmp_path: Path) -> None:
    assert not list(nodes_of(lowered("qwen3", tmp_path).graph, "Shape"))


def test_layers_without_a_cache_read_the_blocks_of_their_owner(tmp_path: Path) -> None:
    graph = lowered("gemma4_text", tmp_path).graph
    caches = [
        [str(value and value.name) for value in n.inputs[3:5]] for n in nodes_of(graph, OPERATOR, DOMAIN)
    ]
    assert caches[:3] == [[f"past_key_values.{i}.{kind}" for kind in ("key", "value")] for i in range(3)]
    assert caches[3:] == [caches[2], caches[1]]


def test_a_deep_mixture_of_experts_is_lowered_in_time_linear_in_its_layers(tmp_path: Path) -> None:
    """Its Reshape nodes read shapes of the residual stream, which has 2^32 paths through these layers."""
    package = export_package(
        write_tiny("qwen3_moe", tmp_path / "checkpoint", num_hidden_layers=16, mlp_only_layers=[]),
        tmp_path / "package",
    )
    model = package.load()
    passes = [PagedAttentionPass(CONTEXT), PagedInputsPass(), SelectLogitsPass(), FlatLogitsPass()]
    assert len(list(nodes_of(run(model, passes)[0].graph, OPERATOR, DOMAIN))) == 16


def test_a_gather_in_the_model_is_not_taken_for_that_of_the_logits(tmp_path: Path) -> None:
    """Traces of experts gather their weights by GatherND, as the selection of logits does."""
    model = portable("llama", tmp_path)
    embedding = next(nodes_of(model.graph, "Gather"))
    last = shared_constant(model.graph, "last", np.array([-1], np.int64))
    index = insert(embedding, "Unsqueeze", [embedding.inputs[1], last]).outputs[0]
    looked_up = insert(embedding, "GatherND", [embedding.inputs[0], index]).outputs[0]
    replace(embedding.outputs[0], looked_up)
    graph = run(model, paged_passes(CONTEXT))[0].graph
    (left,) = nodes_of(graph, "GatherND")
    assert left.outputs[0] is looked_up
    assert "Gather" in {node.op_type for node in graph}


def test_softcap_is_refused_by_name(tmp_path: Path) -> None:
    model = portable("llama", tmp_path)
    node = next(nodes_of(model.graph, "Attention"))
    node.attributes["softcap"] = ir.AttrFloat32("softcap", 30.0)
    with pytest.raises(GraphError, match="has a softcap, which PagedAttention lacks"):
        PagedAttentionPass(CONTEXT)(model)


def test_attention_without_mask_is_refused(tmp_path: Path) -> None:
    model = portable("llama", tmp_path)
    next(nodes_of(model.graph, "Attention")).replace_input_with(3, None)
    with pytest.raises(GraphError, match="no mask"):
        PagedAttentionPass(CONTEXT)(model)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("signed", [True, False])
def test_decomposed_dequantization_gives_equal_results(axis: int, signed: bool) -> None:
    rng = np.random.default_rng(axis)
    shape, small = (8, 6), ((2, 6) if axis == 0 else (8, 3))
    values = rng.integers(0, 127, shape).astype(np.int8 if signed else np.uint8)
    zero_points = rng.integers(0, 127, small).astype(values.dtype)
    block = shape[axis] // small[axis]
    scales = rng.random(small).astype(np.float32)
    tensors: dict[str, npt.NDArray[Any]] = {"w": values, "s": scales}
    if not signed:
        tensors["z"] = zero_points
    operands = "w, s" if signed else "w, s, z"
    model = ir.from_onnx_text(
        f"""<ir_version: 11, opset_import: ["" : 23]> g (float[8, 6] x) => (float[8, 6] y) {{
            d = DequantizeLinear <axis = {axis}, block_size = {block}> ({operands})
            y = Add(x, d)
        }}""",
        initializers=[ir.tensor(array, name=name) for name, array in tensors.items()],
    )
    offset = 0 if signed else zero_points.astype(np.float32).repeat(block, axis)
    expected = (values - offset) * scales.repeat(block, axis)
    ArithmeticDequantizePass()(model)
    assert not list(nodes_of(model.graph, "DequantizeLinear"))
    (got,) = evaluate(model, {"x": np.zeros(shape, np.float32)})
    np.testing.assert_allclose(got, expected, rtol=1e-6)
