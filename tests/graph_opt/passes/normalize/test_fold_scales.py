"""Scales and shifts of channels fold into the layer in front, or behind; what only looks like them stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.passes.normalize.fold_input_scales import FoldInputScalesPass
from carryall.graph_opt.passes.normalize.fold_scales import FoldScalesPass

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return RNG.standard_normal(shape).astype(np.float32)


S, T, V = floats(4), floats(4), np.abs(floats(4)) + 0.5
GIVEN: dict[str, Any] = {
    "w": floats(4, 3, 1, 1), "b": floats(4), "s": S.reshape(4, 1, 1), "t": T.reshape(1, 4, 1, 1),
    "sv": S, "tv": T, "mean": floats(4), "variance": V, "two": np.float32(2), "one": floats(1),
    "up": floats(3, 2, 2, 2), "deep": floats(4, 2, 1, 1), "m": floats(5, 4), "mt": floats(4, 5),
    "si": floats(3, 1, 1), "ti": floats(1, 3, 1, 1), "pos": floats(3, 1, 1) + 3, "wide": floats(1, 1, 1, 4),
    "five": floats(1, 1, 4, 1, 1), "zero": np.float32(0),
}  # fmt: skip
PICTURE = "g (float[2, 3, 4, 4] x) => (float[2, 4, 4, 4] y)"
ROWS = "g (float[6, 5] x) => (float[6, 4] y)"


def conv(shift: Any, **scaled: Any) -> ir.Model:
    return graph(f"{PICTURE} {{ y = Conv(x, k, c) }}", c=shift, **scaled)


def compute(model: ir.Model, x: Any) -> Any:
    """Run in onnxruntime as it stands: ONNX's evaluator fails at groups of a ConvTranspose."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return session.run(None, {"x": x})[0]


def same_numbers(text: str, pass_: Any, **more: Any) -> ir.Model:
    """Run a pass, insist on equal results, and return what it made."""
    before, after = (graph(text, **(GIVEN | more)) for _ in range(2))
    assert apply(pass_, after) == []
    assert pass_.fired == 1
    sizes = [dim if isinstance(dim, int) else 4 for dim in before.graph.inputs[0].shape or ()]
    x = floats(*sizes)
    np.testing.assert_allclose(compute(after, x), compute(before, x), rtol=2e-5, atol=2e-6)
    return after


def test_a_batch_norm_folds_into_its_convolution() -> None:
    model = graph(
        f"{PICTURE} {{ a = Conv(x, w, b) y = BatchNormalization(a, sv, tv, mean, variance) }}", **GIVEN
    )
    assert apply(FoldScalesPass(), model) == []
    factor = S / np.sqrt(V.astype(np.float64) + 1e-5)
    shift = ((GIVEN["b"] - GIVEN["mean"]) * factor + T).astype(np.float32)
    assert_same(model, conv(shift, k=(GIVEN["w"] * factor.reshape(4, 1, 1, 1).astype(np.float32))))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"{PICTURE} {{ a = Conv(x, w) c = Mul(a, s) d = Add(c, t) e = Sub(d, one) y = Div(e, two) }}",
         ["Conv"]),
        (f"{PICTURE} {{ a = Conv(x, w, b) c = Mul(one, a) y = Sub(two, c) }}", ["Conv"]),
        ("g (float[1, 3, 4, 4] x) => (float[1, 2, 5, 5] y) { a = ConvTranspose(x, up) y = Mul(a, two) }",
         ["ConvTranspose"]),
        ("g (float[1, 4, 4, 4] x) => (float[1, 4, 4, 4] y) { a = Conv <group = 2> (x, deep) y = Mul(a, s) }",
         ["Conv"]),
        (f"{ROWS} {{ a = MatMul(x, m) c = Add(a, tv) y = Mul(c, sv) }}", ["MatMul", "Add"]),
        (f"{ROWS} {{ a = Gemm <transB = 1> (x, mt, b) c = Mul(a, sv) y = Add(c, tv) }}", ["Gemm"]),
        (f"{ROWS} {{ a = Gemm(x, m) y = BatchNormalization(a, sv, tv, mean, variance) }}", ["Gemm"]),
    ],
    ids=["chain", "scalars", "transposed", "groups", "product", "rows", "rows normed"],
)  # fmt: skip
def test_chains_fold_with_the_same_numbers(text: str, left: list[str]) -> None:
    assert [node.op_type for node in same_numbers(text, FoldScalesPass()).graph] == left


def test_groups_of_a_transposed_convolution_have_factors_of_their_own() -> None:
    text = """g (float[1, 4, 3, 3] x) => (float[1, 4, 3, 3] y) {
        a = ConvTranspose <group = 2> (x, deep) y = Mul(a, s) }"""
    same_numbers(text, FoldScalesPass())


LOOKALIKES = {
    "along the width": f"{PICTURE} {{ a = Conv(x, w) y = Mul(a, wide) }}",
    "a wider constant": "g (float[2, 3, 4, 4] x) => (float[1, 2, 4, 4, 4] y) "
    "{ a = Conv(x, w) y = Mul(a, five) }",
    "read elsewhere": f"{PICTURE} {{ a = Conv(x, w) c = Mul(a, s) y = Add(c, a) }}",
    "a constant divided": f"{PICTURE} {{ a = Conv(x, w) y = Div(two, a) }}",
    "a bias alone": f"{ROWS} {{ a = MatMul(x, m) y = Add(a, tv) }}",
    "not constant": "g (float[2, 3, 4, 4] x, float[4, 1, 1] f) => (float[2, 4, 4, 4] y) "
    "{ a = Conv(x, w) y = Mul(a, f) }",
    "divided by zero": f"{PICTURE} {{ a = Conv(x, w) y = Div(a, zero) }}",
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes_stay(name: str) -> None:
    model, before = (graph(LOOKALIKES[name], **GIVEN) for _ in range(2))
    assert apply(FoldScalesPass(), model) == []
    assert_same(model, before)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "g (float[2, 3, 4, 4] x) => (float[2, 4, 4, 4] y) { a = Conv(x, w) u = Neg(x) c = Conv(u, w) "
            "d = Mul(a, s) y = Add(d, c) }",
            "its weight has other consumers and would be stored twice",
        ),
        (f"{ROWS} {{ a = Gemm <alpha = 2.0> (x, m) y = Mul(a, sv) }}", "it has alpha or beta other than 1"),
        (f"{PICTURE} {{ a = Conv(x, w) y = Mul(a, far) }}", "a factor or term behind it is not finite"),
    ],
)
def test_refusals_name_the_reason(text: str, reason: str) -> None:
    model = graph(text, **GIVEN, far=np.float32(np.inf))
    assert apply(FoldScalesPass(), model) == [reason]


BEFORE = "g (float[2, 3, 4, 4] x) => (float[2, 4, h, w_] y)"


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("a = Mul(x, si) c = Add(a, ti) y = Conv(c, w, b)", ["Conv"]),
        ("a = Sub(x, ti) c = Div(a, pos) y = Conv(c, w)", ["Conv"]),
        ("a = Mul(x, si) y = Conv <pads = [1, 1, 1, 1]> (a, w, b)", ["Conv"]),
        ("a = Mul(pos, x) c = Add(a, ti) y = Conv <pads = [1, 1, 1, 1]> (c, w, b)", ["Add", "Conv"]),
    ],
    ids=["not padded", "normalized pictures", "a factor, padded", "a term, padded"],
)
def test_what_is_in_front_of_a_convolution_folds(body: str, left: list[str]) -> None:
    made = same_numbers(f"{BEFORE} {{ {body} }}", FoldInputScalesPass())
    assert [node.op_type for node in made.graph] == left


def test_groups_have_inputs_of_their_own() -> None:
    text = """g (float[1, 4, 4, 4] x) => (float[1, 4, 4, 4] y) {
        a = Mul(x, s) c = Add(a, t) y = Conv <group = 2> (c, deep) }"""
    assert len(same_numbers(text, FoldInputScalesPass()).graph) == 1


@pytest.mark.parametrize(
    ("body", "reasons"),
    [
        ("c = Add(x, ti) y = Conv <pads = [1, 1, 1, 1]> (c, w, b)",
         ["a term in front of a padded convolution cannot be folded"]),
        ('c = Add(x, ti) y = Conv <auto_pad = "SAME_UPPER"> (c, w, b)',
         ["a term in front of a padded convolution cannot be folded"]),
        ("a = Mul(x, wide) y = Conv(a, w)", []),
        ("a = Mul(x, si) c = Conv(a, w) d = ReduceMean(a) y = Add(c, d)", []),
    ],
    ids=["padded", "padded by itself", "along the width", "read elsewhere"],
)  # fmt: skip
def test_lookalikes_in_front_stay(body: str, reasons: list[str]) -> None:
    model, before = (graph(f"{BEFORE} {{ {body} }}", **GIVEN) for _ in range(2))
    assert apply(FoldInputScalesPass(), model) == reasons
    assert_same(model, before)
