"""Graphs of onnxruntime-genai's builder, compared with the original graph in onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, graph

from carryall.graph_opt.compare.verify import verify
from carryall.graph_opt.passes.importing.lift_attention import LiftAttentionPass
from carryall.graph_opt.passes.importing.lift_rotary import LiftRotaryPass
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import portable_passes

ort = pytest.importorskip("onnxruntime")
H, KV, D, VOCAB = 4, 2, 16, 11
INPUTS = f"""int64[b, s] input_ids, int64[b, t] attention_mask,
    float[b, {KV}, p, {D}] past_key_values.0.key, float[b, {KV}, p, {D}] past_key_values.0.value"""
OUTPUTS = f"float[b, s, {VOCAB}] logits, float[b, {KV}, t, {D}] pk, float[b, {KV}, t, {D}] pv"
LENGTHS = """sum = ReduceSum <keepdims = 0> (attention_mask, i1) less = Sub(sum, i1)
    lengths = Cast <to = 6> (less)
    shape = Shape(attention_mask) whole = Gather(shape, one) total = Cast <to = 6> (whole)"""
ATTENTION = """a, pk, pv = com.microsoft.GroupQueryAttention
    <num_heads = 4, kv_num_heads = 2, do_rotary = 1{more}>
    ({qkv}, past_key, past_value, lengths, total, cos, sin)"""
ANGLES = np.arange(40)[:, None] * 1e4 ** -(np.arange(D // 2) / (D // 2))


def built(*, packed: bool = True, more: str = "", lengths: str = LENGTHS) -> ir.Model:
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return (0.3 * rng.standard_normal(shape)).astype(np.float32)

    width = (H + 2 * KV) * D
    split = "" if packed else "q, k, v = Split <axis = -1> (qkv, sizes)"
    attention = ATTENTION.format(more=more, qkv="qkv, , " if packed else "q, k, v")
    body = (
        f"{lengths} x = Gather(embed, input_ids) qkv = MatMul(x, w) {split} {attention} logits = MatMul(a, o)"
    )
    text = f"g ({INPUTS}) => ({OUTPUTS}) <float[b, s, {width}] qkv> {{ {body} }}"
    for kind in ("key", "value"):
        text = text.replace(f"past_key_values.0.{kind}", f"past_{kind}")
    model = graph(
        text,
        embed=weight(VOCAB, 32), w=weight(32, width), o=weight(H * D, VOCAB),
        cos=np.cos(ANGLES).astype(np.float32), sin=np.sin(ANGLES).astype(np.float32),
        i1=np.array([1]), one=np.array(1), sizes=np.array([H * D, KV * D, KV * D]),
    )  # fmt: skip
    for value, kind in zip(model.graph.inputs[2:], ("key", "value"), strict=True):
        value.name = f"past_key_values.0.{kind}"
    for value, kind in zip(model.graph.outputs[1:], ("key", "value"), strict=True):
        value.name = f"present.0.{kind}"
    return model


def outputs(
    model: ir.Model, path: Path, past: int, new: int
) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    ir.save(model, path)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(past)
    feed = {
        "input_ids": rng.integers(0, VOCAB, (1, new)),
        "attention_mask": np.ones((1, past + new), np.int64),
        "position_ids": np.arange(past, past + new)[None],
    }
    for kind in ("key", "value"):
        feed[f"past_key_values.0.{kind}"] = rng.standard_normal((1, KV, past, D)).astype(np.float32)
    names = {value.name for value in session.get_inputs()}
    found: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]
    found = session.run(None, {name: array for name, array in feed.items() if name in names})
    return found


@pytest.mark.long
@pytest.mark.parametrize("past", [0, 6])
@pytest.mark.parametrize(
    ("packed", "more"),
    [
        (True, ""),
        (False, ", scale = 0.5"),
        (True, ", local_window_size = 3"),
        (False, ", rotary_interleaved = 1"),
    ],
    ids=["packed", "apart", "window", "interleaved"],
)
def test_the_kernel_becomes_standard_operators(tmp_path: Path, packed: bool, more: str, past: int) -> None:
    expected = outputs(built(packed=packed, more=more), tmp_path / "a.onnx", past, 5)
    model, report = run(built(packed=packed, more=more), portable_passes(), debug=True)
    assert {node.domain for node in model.graph} == {""}
    assert report.after["Attention"] == 1
    assert report.after["RotaryEmbedding"] == 2
    for found, wanted in zip(outputs(model, tmp_path / "b.onnx", past, 5), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "apart"])
def test_a_kernel_without_a_cache_gets_one(tmp_path: Path, packed: bool) -> None:
    expected = outputs(uncached(packed), tmp_path / "a.onnx", 0, 5)
    model, report = run(uncached(packed), portable_passes(), debug=True)
    assert report.after["Attention"] == 1
    assert [value.name for value in model.graph.inputs if str(value.name).startswith("past")] == [
        "past_key_values.0.key",
        "past_key_values.0.value",
    ]
    for found, wanted in zip(outputs(model, tmp_path / "b.onnx", 0, 5), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def uncached(packed: bool) -> ir.Model:
    model = built(packed=packed)
    node = next(node for node in model.graph if node.op_type == "GroupQueryAttention")
    for index in (3, 4):
        node.replace_input_with(index, None)
    del model.graph.inputs[2:]
    return model


def test_a_cache_with_a_dynamic_head_size_runs(tmp_path: Path) -> None:
    """The builder writes int4 models without the head size."""
    stated, open_, lifted = (tmp_path / f"{name}.onnx" for name in ("stated", "open", "lifted"))
    ir.save(built(), stated)
    model = built()
    for cache in [*model.graph.inputs[2:], *model.graph.outputs[1:]]:
        cache.shape = ir.Shape(["b", KV, "p", "size"])
    ir.save(model, open_)
    ir.save(run(model, portable_passes())[0], lifted)
    for left, right in ((stated, open_), (open_, lifted)):
        found = verify(left, right, steps=3)
        assert max(error.max_rel for error in found.outputs.values()) < 1e-6


def test_lengths_from_elsewhere_keep_the_kernel() -> None:
    """The lengths are one less than those of the mask."""
    wrong = LENGTHS.replace(
        "lengths = Cast <to = 6> (less)", "l2 = Sub(less, i1) lengths = Cast <to = 6> (l2)"
    )
    assert apply(LiftAttentionPass(), built(lengths=wrong)) == [
        "its cache lengths differ from those of attention_mask"
    ]


def test_a_smoothed_softmax_keeps_the_kernel() -> None:
    reasons = apply(LiftAttentionPass(), built(more=", smooth_softmax = 1"))
    assert reasons == ["it uses smooth_softmax or returns its scores"]


def test_a_rotary_embedding_of_another_graph_stays() -> None:
    text = """g (float[b, s, 32] x, int64[b, s] p) => (float[b, s, 32] y) {
        y = com.microsoft.RotaryEmbedding <num_heads = 2> (x, p, cos, sin) }"""
    tables = {name: np.ones((8, 8), np.float32) for name in ("cos", "sin")}
    assert apply(LiftRotaryPass(), graph(text, **tables)) == ["the graph is not a decoder"]
