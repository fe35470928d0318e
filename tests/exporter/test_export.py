"""Exported graphs have the canonical forms of docs/contract.md."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import write_tiny

import carryall.exporter.models
from carryall.errors import GraphError
from carryall.exporter.export import ExportedGraph, export_model, export_package, families
from carryall.exporter.signature import DecoderSignature


def weights(model: ir.Model) -> dict[str, ir.LazyTensor]:
    values = model.graph.initializers.values()
    return {
        v.const_value.name or "": v.const_value for v in values if isinstance(v.const_value, ir.LazyTensor)
    }


def ops(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def test_families_are_the_files() -> None:
    folder = Path(carryall.exporter.models.__file__ or "").parent
    assert families() == sorted(path.stem for path in folder.glob("[!_]*.py"))
    assert {"llama", "qwen3", "gpt2"} <= set(families())


def test_inputs_and_outputs(tmp_path: Path) -> None:
    model = export_model(write_tiny("llama", tmp_path, num_hidden_layers=1))
    cache = ["batch", 2, "past_sequence", 8]
    assert {value.name: (value.dtype, _shape(value)) for value in model.graph.inputs} == {
        "input_ids": (ir.DataType.INT64, ["batch", "sequence"]),
        "attention_mask": (ir.DataType.INT64, ["batch", "total_sequence"]),
        "position_ids": (ir.DataType.INT64, ["batch", "sequence"]),
        "past_key_values.0.key": (ir.DataType.FLOAT, cache),
        "past_key_values.0.value": (ir.DataType.FLOAT, cache),
    }
    present = ["batch", 2, "total_sequence", 8]
    assert {value.name: (value.dtype, _shape(value)) for value in model.graph.outputs} == {
        "logits": (ir.DataType.FLOAT, ["batch", "sequence", 260]),
        "present.0.key": (ir.DataType.FLOAT, present),
        "present.0.value": (ir.DataType.FLOAT, present),
    }
    assert model.metadata_props["context_length"] == "128"


def test_nodes_and_weights_carry_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path)
    model = export_model(folder)
    assert set(weights(model)) == set(load_file(folder / "model.safetensors"))
    assert "model.layers.1.self_attn.q_proj/MatMul" in {node.name for node in model.graph}
    names = [node.name for node in model.graph]
    assert len(set(names)) == len(names)


def test_linear_weights_are_stored_in_by_out(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    written = weights(export_model(folder))[name].numpy()
    np.testing.assert_array_equal(written, load_file(folder / "model.safetensors")[name].astype(np.float32).T)


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    model = export_model(write_tiny("qwen3", tmp_path))
    uses = model.graph.initializers["model.embed_tokens.weight"].uses()
    assert sorted(use.node.op_type for use in uses) == ["Gather", "Gemm"]
    assert "lm_head.weight" not in model.graph.initializers


@pytest.mark.parametrize(
    ("model_type", "older", "newer"),
    [("gemma3", "language_model.model.", "model.language_model."), ("gpt2", "transformer.", "")],
)
def test_both_generations_of_tensor_names_are_read(
    tmp_path: Path, model_type: str, older: str, newer: str
) -> None:
    folder = write_tiny(model_type, tmp_path)
    before = export_model(folder)
    file = folder / "model.safetensors"
    save_file({name.replace(older, newer): tensor for name, tensor in load_file(file).items()}, file)
    after = export_model(folder)
    assert {name.replace(older, newer) for name in weights(before)} == set(weights(after))
    assert ops(before) == ops(after)


@pytest.mark.parametrize("model_type", ["phi3", "gpt2"])
def test_fused_projections_are_split(tmp_path: Path, model_type: str) -> None:
    model = export_model(write_tiny(model_type, tmp_path))
    names = {name.rpartition(".")[0].rpartition(".")[2] for name in weights(model)}
    assert {"q_proj", "k_proj", "v_proj"} <= names
    assert not names & {"qkv_proj", "gate_up_proj", "c_attn"}


@pytest.mark.parametrize(
    ("model_type", "masks", "ropes"),
    [("llama", 1, 1), ("mistral", 1, 1), ("gemma3_text", 2, 2), ("smollm3", 1, 1), ("gpt2", 1, 0)],
)
def test_masks_and_ropes_are_shared_by_the_layers(
    tmp_path: Path, model_type: str, masks: int, ropes: int
) -> None:
    counts = ops(export_model(write_tiny(model_type, tmp_path)))
    assert (counts["Range"], counts["Cos"]) == (2 * masks, ropes)


def test_layers_without_a_rope_do_not_rotate(tmp_path: Path) -> None:
    counts = ops(export_model(write_tiny("smollm3", tmp_path)))
    assert (counts["Attention"], counts["RotaryEmbedding"]) == (4, 2 * 3)


def test_a_change_is_applied_before_writing(tmp_path: Path) -> None:
    def double_norm(graph: ExportedGraph) -> ExportedGraph:
        value = graph.model.graph.initializers["model.norm.weight"]
        original = value.const_value
        assert original is not None
        value.const_value = ir.LazyTensor(
            lambda: ir.tensor(original.numpy() * 2, name=value.name),
            dtype=original.dtype,
            shape=ir.Shape([32]),
            name=value.name,
        )
        return replace(graph, quantization={"bits": 4}, passes=("double",))

    source = write_tiny("llama", tmp_path / "checkpoint")
    package = export_package(source, tmp_path / "package", change=double_norm)
    tensor = package.load().graph.initializers["model.norm.weight"].const_value
    assert tensor is not None
    original = load_file(source / "model.safetensors")["model.norm.weight"].astype(np.float32)
    np.testing.assert_array_equal(tensor.numpy(), original * 2)
    assert (package.record.quantization, package.record.passes) == ({"bits": 4}, ("double",))


def test_signature(tmp_path: Path) -> None:
    signature = DecoderSignature.of(export_model(write_tiny("qwen3", tmp_path)))
    assert signature == DecoderSignature(
        caches=((2, 16), (2, 16)), vocab_size=260, kv_dtype=ir.DataType.FLOAT
    )
    assert signature.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4


def test_a_graph_without_a_cache_has_no_signature() -> None:
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["": 23]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
    )
    with pytest.raises(GraphError, match=r"past_key_values\.0\.key"):
        DecoderSignature.of(model)


def test_a_signature_needs_fixed_sizes(tmp_path: Path) -> None:
    model = export_model(write_tiny("llama", tmp_path))
    model.graph.inputs[3].shape = ir.Shape(["batch", "heads", "past", 8])
    with pytest.raises(GraphError, match=r"axis 1 of past_key_values\.0\.key"):
        DecoderSignature.of(model)


def _shape(value: ir.Value) -> list[int | str | None]:
    assert value.shape is not None
    return [size if isinstance(size, int) else size.value for size in value.shape]
