"""Graphs that resemble the patterns of passes, and edge cases of operators: the results stay the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import evaluate, graph

from carryall.graph_opt.graph.load import check_model
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import model_passes, portable_passes

RNG = np.random.default_rng(0)
SMALL = RNG.standard_normal((2, 3)).astype(np.float32)
WIDE = RNG.standard_normal((2, 2, 3, 8)).astype(np.float32)
HEADS = {name: RNG.standard_normal((2, 4, 5, 8)).astype(np.float32) for name in "qkv"}
SQUARE = "g (float[2, 3] x) => (float[2, 3] y)"
MANY = "g (float[n] x) => (float[m] y)"
BIAS = RNG.standard_normal((2, 1, 5, 5)).astype(np.float32)


def optimized(model: ir.Model, passes: list[ir.passes.PassBase] | None = None) -> ir.Model:
    result, _ = run(ir.from_proto(ir.to_proto(model)), passes or portable_passes(), debug=True)
    check_model(result, "optimized")
    return result


def unchanged(model: ir.Model, feed: dict[str, Any]) -> list[str]:
    """Assert equal results of both pipelines and return the operators after the decoder pipeline."""
    after = optimized(model)
    for result in (after, optimized(model, model_passes())):
        for expected, found in zip(evaluate(model, feed), evaluate(result, feed), strict=True):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    return [node.op_type for node in after.graph]


FAR = {
    "first": np.array([0]),
    "end": np.array([4000]),
    "last": np.array([-4095]),
    "endless": np.array([2**63 - 1]),
    "size": np.array([4000]),
    "a": np.float32(1),
    "b": np.float32(2),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "body",
    [
        "t = Abs(x) u = Slice(t, first, end, first) y = Neg(u)",
        "t = Abs(x) u = Slice(t, last, endless, first) y = Neg(u)",
        "s = Shape(x) m = Min(s, size) t = Abs(x) u = Slice(t, first, m, first) y = Neg(u)",
        "s = Shape(x) m = Greater(s, size) y = Where(m, a, b)",
        "s = Shape(x) m = Div(s, size) y = Cast <to = 1> (m)",
    ],
    ids=["the first", "the last", "at most", "more than", "how often"],
)
@pytest.mark.parametrize("length", [1, 300, 9000])
def test_sizes_may_exceed_numbers_in_the_graph(body: str, length: int) -> None:
    unchanged(graph(f"{MANY} {{ {body} }}", **FAR), {"x": np.arange(length, dtype=np.float32)})


NORM = "q = Mul(x, x) m = ReduceMean(q, last) a = Add(m, eps) r = Sqrt(a)"
EPS = {"last": np.array([-1]), "eps": np.float32(1e-6)}
ATTENTION = "kt = Transpose <perm = [0, 1, 3, 2]> (k) t = MatMul(q, kt) %s p = Softmax(s) y = MatMul(p, v)"
ATTENDED = "g (float[2, 4, 5, 8] q, float[2, 4, 5, 8] k, float[2, 4, 5, 8] v, float[2, 1, 5, 5] b)"


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "given", "feed"),
    [
        (
            f"g (float[2, 2, 3, 8] x) => (float[2, 2, 3, 8] y) {{ {NORM} "
            "s = Transpose <perm = [1, 0, 2, 3]> (r) y = Div(x, s) }",
            EPS,
            {"x": WIDE},
        ),
        (f"{SQUARE} {{ c = Clip(x, low, high) s = Sigmoid(x) y = Mul(c, s) }}",
         {"low": np.float32(-7), "high": np.float32(7)}, {"x": 20 * SMALL}),
        ("g (float[3, 3] x) => (float[3, 3] y) { t = Transpose(x) s = Sigmoid(x) y = Mul(t, s) }",
         {}, {"x": WIDE[0, 0, :, :3]}),
        (f"{SQUARE} {{ m = MatMul(x, w) a = Add(m, b) p, q = Split <axis = -1, num_outputs = 2> (a) "
         "c = Concat <axis = 1> (q, p, p) y = Slice(c, zero, three, one) }",
         {"w": np.eye(3, 4, dtype=np.float32), "b": np.array([3], np.float32), "zero": np.array([0]),
          "one": np.array([1]), "three": np.array([3])}, {"x": SMALL}),
        ("g (float[?, ?, 4] x, int64[3] t) => (float[?, ?, 5] y) "
         "{ r = Reshape(x, rows) g = Gemm(r, w) y = Reshape(g, t) }",
         {"rows": np.array([-1, 4]), "w": np.ones((4, 5), np.float32)},
         {"x": WIDE[0, :, :, :4], "t": np.array([3, 2, 5])}),
        (f"{ATTENDED} => (float[2, 4, 5, 8] y) {{ {ATTENTION % 'u = Add(t, b) s = Mul(u, c)'} }}",
         {"c": np.float32(8**-0.5)}, {**HEADS, "b": BIAS}),
        (f"{ATTENDED} => (float[2, 4, 5, 8] y) {{ {ATTENTION % 'u = Mul(t, c) s = Add(u, b)'} }}",
         {"c": np.float32(8**-0.5)}, {**HEADS, "b": BIAS}),
    ],
    ids=["a norm by another's mean", "a clipped factor", "a transposed factor", "one bias for all columns",
         "rows cut otherwise", "a scaled bias", "a bias"],
)  # fmt: skip
def test_lookalikes_keep_their_results(text: str, given: dict[str, Any], feed: dict[str, Any]) -> None:
    unchanged(graph(text, **given), feed)


def test_sizes_of_zero() -> None:
    body = "u = Unsqueeze(x, first) v = Reshape <allowzero = 1> (u, s) y = Neg(v)"
    text = f"g (float[0, 3] x) => (float[3, 0] y) {{ {body} }}"
    unchanged(graph(text, first=np.array([0]), s=np.array([3, 0])), {"x": np.zeros((0, 3), np.float32)})


def test_a_rank_that_depends_on_sizes() -> None:
    text = "g (float[n, m, 1] x) => (float[k] y) { s = Squeeze(x) y = Neg(s) }"
    unchanged(graph(text), {"x": np.ones((1, 3, 1), np.float32)})


def test_strings() -> None:
    body = """t = Gather(words, i) u = Reshape(t, all) m = Transpose(table) y = Concat <axis = 0> (u, more)
        z = Identity(m) n = Cast <to = 1> (numbers) w = Add(x, n)"""
    text = f"g (int64[2] i, float[2] x) => (string[3] y, string[2, 2] z, float[2] w) {{ {body} }}"
    words = {
        "words": ir.StringTensor([b"a", b"b", b"c"], shape=ir.Shape([3]), name="words"),
        "more": ir.StringTensor([b"d"], shape=ir.Shape([1]), name="more"),
        "table": ir.StringTensor([b"p", b"q", b"r", b"s"], shape=ir.Shape([2, 2]), name="table"),
        "numbers": ir.StringTensor([b"1.5", b"-2"], shape=ir.Shape([2]), name="numbers"),
    }
    model = graph(text, all=np.array([-1]))
    for name, value in {value.name: value for node in model.graph for value in node.inputs if value}.items():
        if name in words:
            value.const_value, value.type = words[name], ir.TensorType(ir.DataType.STRING)
            model.graph.register_initializer(value)
    found = evaluate(optimized(model), {"i": np.array([2, 0]), "x": np.zeros(2, np.float32)})
    assert [part.tolist() for part in found] == [["c", "a", "d"], [["p", "r"], ["q", "s"]], [1.5, -2.0]]


def test_names_that_passes_use_themselves() -> None:
    """An exporter may use the same names for its values."""
    body = "t = ReduceMean <axes = [1], keepdims = 1> (x) u = Slice(x, axes_1, one, one) y = Add(t, u)"
    model = ir.from_onnx_text(
        f'<ir_version: 8, opset_import: ["" : 13]> g (float[2, 3] x) => (float[2, 1] y) {{ {body} }}',
        initializers=[ir.tensor(np.array([0]), name="axes_1"), ir.tensor(np.array([1]), name="one")],
    )
    model.graph.initializers["axes_1"].name = "axes.1"
    assert unchanged(model, {"x": SMALL}) == ["ReduceMean", "Slice", "Add"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "given", "feed"),
    [
        ("g (float[n] x) => (float[n] y) { t = Abs(x) u = Slice(t, last, low, zero, last) y = Neg(u) }",
         {"last": np.array([-1]), "low": np.array([-(2**62)]), "zero": np.array([0])},
         {"x": np.arange(3, dtype=np.float32)}),
        ("g (float[n] x, float[1] z) => (float[n] y) { t = Abs(z) s = Shape(x) e = Expand(t, s) y = Neg(e) }",
         {}, {"x": np.ones(3, np.float32), "z": np.ones(1, np.float32)}),
        ("g (float[3, 3] x) => (float[3, 3] y) { c = ReduceMean <keepdims = 0> (x, last) d = Sub(x, c) "
         f"{NORM.replace('x', 'd')} y = Div(d, r) }}", EPS, {"x": WIDE[0, 0, :, :3]}),
        (f"{SQUARE} {{ m = MatMul(x, w) a = Slice(m, zero, six, one, two) y = Neg(a) }}",
         {"w": np.arange(18, dtype=np.float32).reshape(3, 6), "zero": np.array([0]), "one": np.array([1]),
          "two": np.array([2]), "six": np.array([6])}, {"x": SMALL}),
    ],
    ids=["a whole turned round", "a size that varies", "a mean of rows from columns", "every second column"],
)  # fmt: skip
def test_near_identities_are_kept(text: str, given: dict[str, Any], feed: dict[str, Any]) -> None:
    unchanged(graph(text, **given), feed)
