"""MoE and QMoE become the canonical mixture; structure and results are compared with the CPU's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from graph_asserts import apply, assert_same, evaluate, graph

from carryall.graph_opt.experts.mixture import Activation, Mixture, find_mixture
from carryall.graph_opt.lower.kernels import CPU, CUDA
from carryall.graph_opt.lower.products.moe import FusedExpertsPass
from carryall.graph_opt.passes.importing.lift_moe import LiftMoEPass

ort = pytest.importorskip("onnxruntime")
EXPERTS, HIDDEN, WIDTH, TOKENS = 4, 32, 32, 7
RNG = np.random.default_rng(0)
GPT_OSS = "activation_alpha = 1.702, activation_beta = 1.0, swiglu_limit = 0.7, "
Arrays = dict[str, npt.NDArray[Any]]


def floats(*shape: int) -> npt.NDArray[np.float32]:
    return RNG.standard_normal(shape).astype(np.float32) * np.float32(0.3)


FLOATS: Arrays = {
    "w1": floats(EXPERTS, 2 * WIDTH, HIDDEN),
    "b1": floats(EXPERTS, 2 * WIDTH),
    "w1_single": floats(EXPERTS, WIDTH, HIDDEN),
    "w2": floats(EXPERTS, HIDDEN, WIDTH),
    "b2": floats(EXPERTS, HIDDEN),
    "w3": floats(EXPERTS, WIDTH, HIDDEN),
    "none": np.zeros((EXPERTS, 2 * WIDTH), np.float32),
    "router": floats(HIDDEN, EXPERTS),
    "row": np.array([-1, EXPERTS]),
}


def routed(node: str, given: Arrays, lead: str = "1, N") -> ir.Model:
    """Return a graph of a router and a node on tokens x and the router's scores."""
    text = f"""g (float[{lead}, {HIDDEN}] x) => (float[{lead}, {HIDDEN}] y) {{
        raw = MatMul(x, router) scores = Reshape(raw, row) likely = Softmax(scores) mild = Sigmoid(scores)
        y = com.microsoft.{node} }}"""
    return graph(text, **FLOATS, **given)


def swiglu(attributes: str = "", fusion: int = 1, k: int = 2) -> str:
    return f'k = {k}, activation_type = "swiglu", swiglu_fusion = {fusion}, {attributes} use_sparse_mixer = 0'


def quantized(bits: int, block: int, *, points: bool) -> Arrays:
    """Return random weights in the operator's layout."""
    found: Arrays = {}
    for name, rows, inner in (("1", 2 * WIDTH, HIDDEN), ("2", HIDDEN, WIDTH), ("1_single", WIDTH, HIDDEN)):
        blocks = inner // block if block else 1
        found[f"q{name}"] = RNG.integers(0, 256, (EXPERTS, rows, inner * bits // 8)).astype(np.uint8)
        scales = (RNG.random((EXPERTS, rows, blocks)) + 0.5) * 0.5**bits
        found[f"s{name}"] = (scales if block else scales[..., 0]).astype(np.float32)
        shape = (EXPERTS, rows, -(-blocks * bits // 8)) if block else (EXPERTS, rows * bits // 8)
        if points:
            found[f"z{name}"] = RNG.integers(0, 256, shape).astype(np.uint8)
    return found


def qmoe(attributes: str, bits: int, block: int, *, points: bool = False, extra: str = "") -> str:
    offsets = ", , , , z1, z2" if points else ", , , , , "
    more = f", , {extra}" if extra else ""
    sized = f", block_size = {block}" if block else ""
    return (
        f"QMoE <{attributes}, expert_weight_bits = {bits}{sized}>"
        f" (x, scores, q1, s1, b1, q2, s2, b2{offsets if points or extra else ''}{more})"
    )


def kernel(model: ir.Model, x: npt.NDArray[Any], path: Path) -> npt.NDArray[Any]:
    ir.save(model, path / "model.onnx")
    session = ort.InferenceSession(path / "model.onnx", providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


def mixtures(model: ir.Model) -> list[Mixture]:
    found = [find_mixture(node) for node in model.graph if node.op_type == "Split"]
    return [one for one in found if isinstance(one, Mixture)]


def single(activation: str) -> str:
    node = f'MoE <k = 2, activation_type = "{activation}", normalize_routing_weights = 1>'
    return f"{node} (x, scores, w1_single, , w2, b2)"


NORMALIZED = "normalize_routing_weights = 1,"
CASES: dict[str, tuple[str, Arrays]] = {
    "swiglu": (f"MoE <{swiglu()}> (x, scores, w1, , w2)", {}),
    "normalized": (f"MoE <{swiglu(NORMALIZED)}> (x, scores, w1, , w2)", {}),
    "one expert a token": (f"MoE <{swiglu(k=1)}> (x, scores, w1, , w2)", {}),
    "gpt-oss": (f"MoE <{swiglu(GPT_OSS + NORMALIZED)}> (x, scores, w1, b1, w2, b2)", {}),
    **{name: (single(name), {}) for name in ("silu", "gelu", "relu", "identity")},
    **{
        f"{bits} bits, block {block}{', zero points' * points}": (
            qmoe(swiglu(GPT_OSS + NORMALIZED), bits, block, points=points),
            quantized(bits, block, points=points),
        )
        for bits, block in ((4, 0), (4, 16), (4, 32), (8, 0))
        for points in (False, True)
    },
    "router weights": (qmoe(swiglu(), 4, 16, extra="mild"), quantized(4, 16, points=False)),
    "their shares": (qmoe(swiglu(NORMALIZED), 4, 16, extra="mild"), quantized(4, 16, points=False)),
    "softmax given": (qmoe(swiglu(), 4, 16, extra="likely"), quantized(4, 16, points=False)),
}


@pytest.mark.parametrize("case", list(CASES))
def test_results_equal_the_kernel(case: str, tmp_path: Path) -> None:
    node, given = CASES[case]
    x = RNG.standard_normal((1, TOKENS, HIDDEN)).astype(np.float32)
    expected = kernel(routed(node, given), x, tmp_path)
    model = routed(node, given)
    assert apply(LiftMoEPass(), model) == []
    assert not [node for node in model.graph if node.domain]
    np.testing.assert_allclose(evaluate(model, {"x": x})[0], expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("case", ["swiglu", "normalized", "gpt-oss", "4 bits, block 16", "softmax given"])
def test_it_is_the_canonical_mixture(case: str) -> None:
    model = routed(*CASES[case])
    assert apply(LiftMoEPass(), model) == []
    (found,) = mixtures(model)
    clipped = case in ("gpt-oss", "4 bits, block 16")
    given = Activation("silu", np.float32(1.702).item(), 1.0, np.float32(0.7).item())
    assert {one.activation for one in found.experts} == {given if clipped else Activation()}
    assert {layer.bias is not None for one in found.experts for layer in one.layers} == {
        "b1" in CASES[case][0]
    }
    assert found.router is not None
    assert (found.per_token, found.router.normalize) == (2, NORMALIZED in CASES[case][0])


def test_column_scales_become_supported_blocks() -> None:
    model = routed(*CASES["4 bits, block 0"])
    apply(LiftMoEPass(), model)
    weights = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    assert {node.attributes["block_size"].as_int() for node in weights} == {32}
    assert len(weights) == 3 * EXPERTS


def test_biases_of_zeros_are_left_out() -> None:
    model = routed(f"MoE <{swiglu()}> (x, scores, w1, none, w2)", {})
    plain = routed(f"MoE <{swiglu()}> (x, scores, w1, , w2)", {})
    assert apply(LiftMoEPass(), model) == apply(LiftMoEPass(), plain) == []
    assert_same(model, plain)


@pytest.mark.parametrize(
    ("case", "kernels", "op_type"),
    [("gpt-oss", CUDA, "MoE"), ("4 bits, block 16", CPU, "QMoE")],
)
def test_lowering_restores_the_operator(case: str, kernels: Any, op_type: str, tmp_path: Path) -> None:
    x = RNG.standard_normal((1, TOKENS, HIDDEN)).astype(np.float32)
    expected = kernel(routed(*CASES[case]), x, tmp_path)
    model = routed(*CASES[case])
    apply(LiftMoEPass(), model)
    assert apply(FusedExpertsPass(kernels.experts), model) == []
    (node,) = [node for node in model.graph if node.domain]
    assert node.op_type == op_type
    assert node.attributes["swiglu_limit"].as_float() == pytest.approx(0.7)
    np.testing.assert_allclose(kernel(model, x, tmp_path), expected, rtol=1e-5, atol=1e-5)


HALVES = {"w1_halves": np.concatenate([FLOATS["w1"][:, 0::2], FLOATS["w1"][:, 1::2]], axis=1)}
APART = {"gate": FLOATS["w1"][:, 0::2], "up": FLOATS["w1"][:, 1::2]}


@pytest.mark.parametrize(
    ("node", "given"),
    [
        (f"MoE <{swiglu(GPT_OSS, fusion=2)}> (x, scores, w1_halves, , w2)", HALVES),
        (f"MoE <{swiglu(GPT_OSS, fusion=0)}> (x, scores, gate, , w2, , up)", APART),
    ],
    ids=["halves", "apart"],
)
def test_other_layouts_of_gate_and_up(node: str, given: Arrays) -> None:
    """onnxruntime's CPU kernels support only interleaved gate and up."""
    x = RNG.standard_normal((1, TOKENS, HIDDEN)).astype(np.float32)
    model, in_turn = routed(node, given), routed(f"MoE <{swiglu(GPT_OSS)}> (x, scores, w1, , w2)", {})
    assert apply(LiftMoEPass(), model) == apply(LiftMoEPass(), in_turn) == []
    np.testing.assert_array_equal(evaluate(model, {"x": x})[0], evaluate(in_turn, {"x": x})[0])


@pytest.mark.long
def test_the_third_layer_is_the_up_projection() -> None:
    node = 'MoE <k = 2, activation_type = "silu"> (x, scores, gate, , w2, , up)'
    model, in_turn = routed(node, APART), routed(f"MoE <{swiglu()}> (x, scores, w1, , w2)", {})
    assert apply(LiftMoEPass(), model) == apply(LiftMoEPass(), in_turn) == []
    (found,) = mixtures(model)
    assert found.router is not None
    assert not found.router.normalize
    x = RNG.standard_normal((1, TOKENS, HIDDEN)).astype(np.float32)
    np.testing.assert_array_equal(evaluate(model, {"x": x})[0], evaluate(in_turn, {"x": x})[0])


def qmoe_with(attributes: str) -> tuple[str, Arrays]:
    return qmoe(f"{swiglu()}, {attributes}", 4, 16), quantized(4, 16, points=False)


def packed_for_cuda() -> tuple[str, Arrays]:
    """Return weights in the shapes that onnxruntime-genai's builder prepacks: [experts, in, bytes of out]."""
    given = quantized(4, 16, points=False)
    for name, inner in (("q1", HIDDEN), ("q2", WIDTH)):
        given[name] = given[name].reshape(EXPERTS, inner, -1)
    return qmoe(swiglu(), 4, 16), given


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (qmoe_with("weights_prepacked = 1"), "packed for CUDA; export the model with weights_prepacked 0"),
        (packed_for_cuda(), "the shapes of its weights do not match"),
        (qmoe_with('quant_type = "nvfp4"'), "its 4-bit weights of quant_type nvfp4 cannot be expressed"),
        (
            qmoe_with("fc2_expert_weight_bits = 2"),
            "its 2-bit weights of quant_type int cannot be expressed",
        ),
        ((single("geglu"), {}), "its activation geglu is not supported"),
        ((f"MoE <{swiglu()}> (x, scores, w1_single, , w2)", {}), "the shapes of its weights do not match"),
        (
            (f"MoE <{swiglu(fusion=0)}> (x, scores, w1, , w2)", {}),
            "SwiGLU needs either FC3 or gate and up in FC1",
        ),
        (
            (f"MoE <{swiglu(fusion=1)}> (x, scores, w1, , w2, , w3)", {}),
            "SwiGLU needs either FC3 or gate and up in FC1",
        ),
        ((f"MoE <{swiglu(fusion=3)}> (x, scores, w1, , w2)", {}), "swiglu_fusion 3 is not supported"),
        (("MoE <k = 2, use_sparse_mixer = 1> (x, scores, w1_single, , w2)", {}), "it routes by SparseMixer"),
    ],
)
def test_forms_without_a_canonical_form_keep_the_operator(case: tuple[str, Arrays], reason: str) -> None:
    model = routed(*case)
    (refused,) = apply(LiftMoEPass(), model)
    assert reason in refused
    assert len([node for node in model.graph if node.domain]) == 1


def test_computed_weights_keep_the_operator() -> None:
    text = f"""g (float[N, {HIDDEN}] x) => (float[N, {HIDDEN}] y) {{ scores = MatMul(x, router) w = Neg(w2)
        y = com.microsoft.MoE <{swiglu()}> (x, scores, w1, , w) }}"""
    assert apply(LiftMoEPass(), graph(text, **FLOATS)) == ["its weights are not constant"]
