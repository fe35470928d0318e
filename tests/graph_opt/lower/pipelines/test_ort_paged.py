"""PagedAttention for CUDA: results by the operator's definition, and onnxruntime's checks of the graph."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from paged_attention_stand_in import PagedStandInPass
from tiny_models import write_tiny

from carryall.errors import UsageError
from carryall.exporter.export import export_package
from carryall.graph_opt.compare.runners import PortableRunner
from carryall.graph_opt.graph.edit import MICROSOFT, nodes_of
from carryall.graph_opt.lower.kernels import CUDA
from carryall.graph_opt.lower.paged_kv import block_size
from carryall.graph_opt.lower.pipelines.ort_paged import TABLES
from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.pipeline.pipeline import run

CONTEXT, BLOCK = 64, 16
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"attn_logit_softcapping": 2.0},  # also windows of 5
    "gpt2": {},
    "smollm3": {},  # a layer without rope
    "phi3": {},
}


def portable(family: str, folder: Path) -> ir.Model:
    checkpoint = write_tiny(family, folder / "checkpoint", **FAMILIES[family])
    return export_package(checkpoint, folder / "package").load()


def lowered(model: ir.Model, compute: ir.DataType | None = None) -> ir.Model:
    kernels = dataclasses.replace(CUDA, float_attention=True)
    options = SlotOptions(context_length=CONTEXT, kernels=kernels, compute=compute, paged=True)
    return run(model, slot_passes(options), debug=True)[0]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_portable_graph(family: str, tmp_path: Path) -> None:
    """One run mixes prompts, pieces on scattered blocks, and single tokens."""
    model, rng = portable(family, tmp_path), np.random.default_rng(0)
    ids = rng.integers(0, 256, 48)
    oracle = PortableRunner(_saved(portable(family, tmp_path / "oracle"), tmp_path / "a.onnx"))
    expected = oracle.forward({0: ids})[0]
    graph = run(lowered(model), [PagedStandInPass()])[0]
    session = onnxruntime.InferenceSession(_saved(graph, tmp_path / "b.onnx"))
    caches = {
        value.name: np.zeros((8, BLOCK, *value.shape[2:]), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    tables = [[5, 2, 7], [1, 4, 3]]
    held = [0, 0]
    for step in ([40, 3], [1, 30], [7, 1]):
        feeds = _batch(ids, held, step, tables)
        known = {value.name for value in session.get_inputs()}
        names = [value.name for value in session.get_outputs()]
        results = dict(
            zip(
                names,
                session.run(None, {k: v for k, v in (feeds | caches).items() if k in known}),
                strict=True,
            )
        )
        caches = {name: results[name.replace("past_key_values", "present")] for name in caches}
        wanted = [held[row] + count - 1 for row, count in enumerate(step)]
        np.testing.assert_allclose(results["logits"][:, 0], expected[wanted], atol=1e-4)
        held = [length + count for length, count in zip(held, step, strict=True)]


def _batch(
    ids: np.ndarray[tuple[int], np.dtype[np.int64]], held: list[int], step: list[int], tables: list[list[int]]
) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    positions = np.concatenate([np.arange(at, at + count) for at, count in zip(held, step, strict=True)])
    begins = np.array([0, *np.cumsum(step)], np.int32)
    return {
        "input_ids": ids[positions][:, None],
        "position_ids": positions[:, None],
        "logits_positions": begins[1:].astype(np.int64) - 1,
        "cumulative_sequence_length": begins,
        "past_seqlens": np.array(held, np.int32),
        "block_table": np.array(tables, np.int32),
        "attention_metadata": np.array([max(step), CONTEXT, 0], np.int32),
    }


def _saved(model: ir.Model, path: Path) -> Path:
    ir.save(model, path, external_data=f"{path.name}.data")
    return path


def test_onnxruntime_accepts_the_graph_and_lacks_only_kernels(tmp_path: Path) -> None:
    """Its schemas check types and attributes before the kernels; fp16 would be converted to float first."""
    graph = lowered(portable("qwen3", tmp_path), ir.DataType.BFLOAT16)
    with pytest.raises(Exception, match="NOT_IMPLEMENTED : Could not find an implementation"):
        onnxruntime.InferenceSession(_saved(graph, tmp_path / "half.onnx"))
    next(nodes_of(graph.graph, "PagedAttention", MICROSOFT)).attributes["unknown"] = ir.AttrInt64(
        "unknown", 1
    )
    with pytest.raises(Exception, match="Unrecognized attribute: unknown for operator PagedAttention"):
        onnxruntime.InferenceSession(_saved(graph, tmp_path / "wrong.onnx"))


@pytest.mark.parametrize("compute", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_caches_and_tables_are_in_place(compute: ir.DataType, tmp_path: Path) -> None:
    graph = lowered(portable("qwen3", tmp_path), compute).graph
    nodes = list(nodes_of(graph, "PagedAttention", MICROSOFT))
    assert len(nodes) == 2
    assert {value.name for value in graph.inputs} >= set(TABLES)
    for node in nodes:
        assert [value and value.name for value in node.inputs[5:8]] == list(TABLES)[:3]
        norms = [f"model.layers.{nodes.index(node)}.self_attn.{part}_norm.weight" for part in "qk"]
        assert [value and value.name for value in node.inputs[10:]] == [
            *[None] * 2,
            *norms,
            *[None] * 2,
            "attention_metadata",
        ]
        assert node.attributes["qk_norm_epsilon"].as_float() == pytest.approx(1e-5)
        packed, key, value, *_ = node.inputs
        assert (key, value) == (None, None)
        assert packed is not None
        squeeze = packed.producer()
        assert squeeze is not None
        assert squeeze.op_type == "Squeeze"
        assert {value.dtype for value in node.inputs[3:5] if value} == {compute}
        assert all(value.is_graph_output() for value in node.outputs[1:])
        assert node.attributes["do_rotary"].as_int() == 1


def test_a_layer_has_ten_nodes_that_start_kernels(tmp_path: Path) -> None:
    """Squeeze and Unsqueeze share the memory of their operand."""
    graph = lowered(portable("qwen3", tmp_path), ir.DataType.FLOAT16).graph
    first, second = (index for index, node in enumerate(graph) if node.op_type == "PagedAttention")
    layer = Counter(node.op_type for node in list(graph)[first:second])
    assert layer.pop("Squeeze") + layer.pop("Unsqueeze") == 2
    assert layer == {
        "PagedAttention": 1,
        "MatMul": 4,
        "SkipSimplifiedLayerNormalization": 2,
        "Split": 1,
        "QuickGelu": 1,
        "Mul": 1,
    }


def test_block_sizes_are_supported_by_flash_attention() -> None:
    assert [block_size(size) for size in (32, 64, 80, 128, 256)] == [256, 256, 128, 128, 64]


def test_a_cache_of_8_bits_is_refused() -> None:
    with pytest.raises(UsageError, match="a paged KV cache cannot be int8"):
        SlotOptions(context_length=8, kernels=CUDA, compute=ir.DataType.FLOAT16, paged=True, kv_cache="int8")
