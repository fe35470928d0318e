"""PagedAttention for CUDA: results by the operator's definition, and onnxruntime's checks of the graph."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest
from lowered_forms import decoder
from paged_attention_stand_in import PagedStandInPass
from tiny_models import write_tiny

from carryall.contract import is_past
from carryall.errors import UsageError
from carryall.exporter.export import export_package
from carryall.graph_opt.compare.runners import PortableRunner
from carryall.graph_opt.graph.edit import MICROSOFT, add_initializer, nodes_of
from carryall.graph_opt.lower.kernels import CPU, CUDA
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


def lowered(model: ir.Model, compute: ir.DataType | None = None, **options: str) -> ir.Model:
    kernels = dataclasses.replace(CUDA, float_attention=True)
    chosen: dict[str, Any] = {"context_length": CONTEXT, "kernels": kernels, "compute": compute, **options}
    return run(model, slot_passes(SlotOptions(paged=True, **chosen)), debug=True)[0]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_portable_graph(family: str, tmp_path: Path) -> None:
    """One run mixes prompts, pieces on scattered blocks, and single tokens."""
    model, ids = portable(family, tmp_path), np.random.default_rng(0).integers(0, 256, 48)
    oracle = PortableRunner(_saved(portable(family, tmp_path / "oracle"), tmp_path / "a.onnx"))
    for found, expected in _pairs(oracle, lowered(model), ids, tmp_path):
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "kind"), [("int8-kv", "int8"), ("int8-kv-tensor", "int8"), ("int8-kv", "fp8")]
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_on_a_cache_of_8_bits_are_those_of_quantized_keys_and_values(
    family: str, form: str, kind: str, tmp_path: Path
) -> None:
    """A few numbers lie between two of the cache and round to the other one."""
    ids = np.random.default_rng(0).integers(0, 250, 48)
    model = decoder(family, form, tmp_path)
    rounded = _in_fp8(decoder(family, form, tmp_path)) if kind == "fp8" else decoder(family, form, tmp_path)
    oracle = PortableRunner(_saved(rounded, tmp_path / "a.onnx"))
    exact = PortableRunner(_saved(decoder(family, "float", tmp_path), tmp_path / "c.onnx")).forward({0: ids})[
        0
    ]
    graph = lowered(model, kv_cache=kind)
    caches = {value.dtype for value in graph.graph.inputs if is_past(value.name)}
    assert caches == {ir.DataType.INT8 if kind == "int8" else ir.DataType.FLOAT8E4M3FN}
    for (found, expected), places in zip(_pairs(oracle, graph, ids, tmp_path), WANTED, strict=True):
        size = np.linalg.norm(expected)
        assert np.linalg.norm(found - expected) < 2e-3 * size
        assert np.linalg.norm(expected - exact[places]) > 2e-2 * size  # the cache loses something


def _in_fp8(model: ir.Model) -> ir.Model:
    """Return a model with keys and values in float8e4m3fn, whose largest number is int8's at its scale."""
    changed: dict[str, ir.Value] = {}
    for node in model.graph:
        if not str(node.name).startswith("kv_cache."):
            continue
        for place, value in list(enumerate(node.inputs))[1:]:
            assert value is not None
            assert value.const_value is not None
            content = np.asarray(value.const_value.numpy().astype(np.float32) * np.float32(127 / 448))
            if value.dtype == ir.DataType.INT8:
                content = content.astype(ml_dtypes.float8_e4m3fn)
            name = f"{value.name}.fp8"
            if name not in changed:
                changed[name] = add_initializer(model.graph, name, content)
            node.replace_input_with(place, changed[name])
        if node.op_type == "QuantizeLinear":
            if len(node.inputs) < 3:
                kind = int(ir.DataType.FLOAT8E4M3FN)
                node.attributes["output_dtype"] = ir.AttrInt64("output_dtype", kind)
            node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT8E4M3FN)
    return model


WANTED = [[39, 2], [40, 32], [47, 33]]  # positions of the logits of ``_pairs``


def _pairs(
    oracle: PortableRunner, model: ir.Model, ids: Any, folder: Path
) -> Iterator[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """Run a lowered graph over mixed steps; yield its logits, and the oracle's at the same positions."""
    expected = oracle.forward({0: ids})[0]
    graph = run(model, [PagedStandInPass()])[0]
    session = onnxruntime.InferenceSession(_saved(graph, folder / "b.onnx"))
    caches: dict[str, Any] = {
        str(value.name): np.zeros((8, BLOCK, *value.shape[2:]), value.dtype.numpy())
        for value in graph.graph.inputs
        if is_past(value.name) and value.shape is not None and value.dtype is not None
    }
    tables = [[5, 2, 7], [1, 4, 3]]
    held = [0, 0]
    for step in ([40, 3], [1, 30], [7, 1]):
        feeds = _batch(ids, held, step, tables)
        known = {value.name for value in session.get_inputs()}
        names = [value.name for value in session.get_outputs()]
        values = session.run_with_ort_values(names, _values(feeds | caches, known))
        results = dict(zip(names, values, strict=True))
        caches = {name: results[name.replace("past_key_values", "present")] for name in caches}
        wanted = [held[row] + count - 1 for row, count in enumerate(step)]
        yield results["logits"].numpy()[:, 0], expected[wanted]
        held = [length + count for length, count in zip(held, step, strict=True)]


def _values(feeds: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """Return feeds as values of onnxruntime, of which NumPy lacks a type."""
    make = onnxruntime.OrtValue
    return {
        name: array
        if isinstance(array, make)
        else make.ortvalue_from_numpy_with_onnx_type(array.view(np.uint8), ir.DataType.FLOAT8E4M3FN)
        if array.dtype == ml_dtypes.float8_e4m3fn
        else make.ortvalue_from_numpy(array)
        for name, array in feeds.items()
        if name in known
    }


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


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "kind", "shape"), [("int8-kv", "PER_CHANNEL", [2, 1, 64]), ("int8-kv-tensor", "PER_TENSOR", [1])]
)
@pytest.mark.parametrize("kv_cache", ["auto", "fp8"])
def test_scales_of_a_cache_of_8_bits_have_the_form_of_the_operator(
    form: str, kind: str, shape: list[int], kv_cache: str, tmp_path: Path
) -> None:
    graph = lowered(decoder("qwen3", form, tmp_path), ir.DataType.BFLOAT16, kv_cache=kv_cache).graph
    nodes = list(nodes_of(graph, "PagedAttention", MICROSOFT))
    assert len(nodes) == 2
    for node in nodes:
        scales = [value.const_value for value in node.inputs[14:16] if value is not None]
        assert [scale is not None and list(scale.shape) for scale in scales] == [shape] * 2
        assert {scale.dtype for scale in scales if scale is not None} == {ir.DataType.FLOAT}
        assert node.attributes["k_quant_type"].as_string() == kind
        assert "kv_cache_bit_width" not in node.attributes  # it is GroupQueryAttention's
        assert all(node.inputs[12:14])  # the norms of q and k stay inside
        assert scales[0] is not None
        expected = 0.08 * (127 / 448 if kv_cache == "fp8" else 1)
        assert scales[0].numpy() == pytest.approx(expected)


def test_a_cache_of_8_bits_needs_scales(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the model has no scales for an int8 KV cache"):
        lowered(portable("llama", tmp_path), kv_cache="int8")
    with pytest.raises(UsageError, match="the target's attention kernel has no fp8 KV cache"):
        SlotOptions(context_length=8, kernels=CPU, kv_cache="fp8")
