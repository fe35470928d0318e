"""Quantization nodes move only if the results stay bit-identical."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graph_asserts import apply, assert_same, evaluate, graph
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.graph_opt.passes.normalize.fold_transposes import FoldTransposesPass
from carryall.graph_opt.passes.normalize.move_qdq import MoveQDQPass
from carryall.graph_opt.pipeline.canonical import canonical_passes
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import model_passes

RNG = np.random.default_rng(5)
GIVEN: dict[str, Any] = {
    "s": np.float32(0.1), "t": np.float32(0.1), "u": np.float32(0.3), "z": np.int8(3), "o": np.int8(0),
    "uz": np.uint8(3), "s2": np.array([0.1, 0.2], np.float32), "z2": np.array([1, -1], np.int8),
    "s3": np.array([0.1, 0.2, 0.3], np.float32), "z3": np.zeros(3, np.int8), "half": np.float16(0.1),
    "brain": ir.tensor(np.float32(0.1)).numpy(), "nought": np.float32(0), "minus": np.float32(-0.1),
    "W": RNG.integers(-9, 9, (2, 3), np.int8), "rows": np.array([0, 2]), "flat": np.array([-1]),
    "one": np.array([1]), "two": np.array([2]), "three": np.array([3]), "ends": np.array([0]),
    "w16": np.int16(3),
    "pairs": np.array([2, 3, 1]), "sixes": np.array([6]), "parts": np.array([1, 1]),
}  # fmt: skip
Q, DQ = "QuantizeLinear", "DequantizeLinear"


def case(signature: str, body: str) -> ir.Model:
    return graph(f"g {signature} {{ {body} }}", **GIVEN)


# name: signature, values with known types, before, after
MOVES = {
    "a round trip": (
        "(int8[2, 3] x) => (int8[2, 3] y)",
        f"d = {DQ}(x, s, z) q = {Q}(d, t, z) y = Transpose<perm = [0, 1]>(q)",
        "y = Transpose<perm = [0, 1]>(x)",
    ),
    "a zero point of 0 and none": (
        "(int8[2, 3] x) => (int8[3, 2] y)",
        f"d = {DQ}(x, s) q = {Q}(d, s, o) y = Transpose<perm = [1, 0]>(q)",
        "y = Transpose<perm = [1, 0]>(x)",
    ),
    "a round trip with a transposition between, along an axis": (
        "(int8[2, 3] x) => (int8[3, 2] y)",
        f"a = Transpose<perm = [1, 0]>(x) d = {DQ}<axis = 1>(a, s2, z2) e = Transpose<perm = [1, 0]>(d) "
        f"q = {Q}<axis = 0>(e, s2, z2) y = Transpose<perm = [1, 0]>(q)",
        "a = Transpose<perm = [1, 0]>(x) b = Transpose<perm = [1, 0]>(a) y = Transpose<perm = [1, 0]>(b)",
    ),
    "dequantized later": (
        "(int8[2, 3] x) => (float[2, 2] y)",
        f"d = {DQ}<axis = 0>(x, s2, z2) a = Transpose<perm = [1, 0]>(d) b = Gather(a, rows) y = Abs(b)",
        f"a = Transpose<perm = [1, 0]>(x) b = Gather(a, rows) d = {DQ}<axis = 1>(b, s2, z2) y = Abs(d)",
    ),
    "a pair stays a pair": (
        "(float[2, 3] x) => (float[6] y)",
        f"q = {Q}(x, s, z) d = {DQ}(q, s, z) r = Reshape(d, flat) y = Abs(r)",
        f"r = Reshape(x, flat) q = {Q}(r, s, z) d = {DQ}(q, s, z) y = Abs(d)",
    ),
    "what is joined": (
        "(int8[2, 3] x, int8[2, 3] w) => (float[4, 3] y)",
        f"a = {DQ}(x, s, z) b = {DQ}(w, t, z) c = Concat<axis = 0>(a, b) y = Abs(c)",
        f"c = Concat<axis = 0>(x, w) d = {DQ}(c, s, z) y = Abs(d)",
    ),
    "what is cut": (
        "(int8[2, 3] x) => (float[1, 3] y)",
        f"d = {DQ}(x, s, z) a, b = Split<axis = 0>(d, parts) y = Add(a, b)",
        f"a, b = Split<axis = 0>(x, parts) c = {DQ}(a, s, z) d = {DQ}(b, s, z) y = Add(c, d)",
    ),
    "quantized earlier": (
        "(float[2, 3] x) => (int8[3, 1, 2] y)",
        f"a = Transpose<perm = [1, 0]>(x) b = Unsqueeze(a, one) y = {Q}<axis = 2>(b, s2, z2)",
        f"q = {Q}<axis = 0>(x, s2, z2) a = Transpose<perm = [1, 0]>(q) y = Unsqueeze(a, one)",
    ),
    "the largest": (
        "(int8[1, 2, 4] x) => (float[1, 2, 2] y)",
        f"d = {DQ}(x, s, z) m = MaxPool<kernel_shape = [3]>(d) y = Abs(m)",
        f"m = MaxPool<kernel_shape = [3]>(x) d = {DQ}(m, s, z) y = Abs(d)",
    ),
    "a slice": (
        "(int8[2, 3] x) => (float[2, 2] y)",
        f"d = {DQ}<axis = 0>(x, s2) a = Slice(d, one, three, one) y = Abs(a)",
        f"a = Slice(x, one, three, one) d = {DQ}<axis = 0>(a, s2) y = Abs(d)",
    ),
    "a weight": (
        "(float[4, 3] x) => (float[4, 2] y)",
        f"d = {DQ}<axis = 0>(W, s2) v = Transpose<perm = [1, 0]>(d) y = MatMul(x, v)",
        f"v = Transpose<perm = [1, 0]>(W) d = {DQ}<axis = 1>(v, s2) y = MatMul(x, d)",
    ),
}


def with_shapes(signature: str, body: str) -> ir.Model:
    model = case(signature, body)
    return ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(model)))


def random_feed(model: ir.Model) -> dict[str, Any]:
    feed: dict[str, Any] = {}
    for value in model.graph.inputs:
        shape = [size if isinstance(size, int) else 2 for size in value.shape or ()]
        kind = value.dtype.numpy() if value.dtype is not None else np.float32
        content = (
            RNG.integers(-128, 128, shape) if np.issubdtype(kind, np.integer) else RNG.normal(0, 9, shape)
        )
        feed[str(value.name)] = content.astype(kind)
    return feed


@pytest.mark.parametrize("name", MOVES)
def test_a_move(name: str) -> None:
    signature, before, after = MOVES[name]
    model = with_shapes(signature, before)
    feed = random_feed(model)
    expected = evaluate(model, feed)
    assert apply(MoveQDQPass(), model) == []
    assert_same(model, with_shapes(signature, after))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    np.testing.assert_array_equal(evaluate(model, feed)[0], expected[0])


ROW = "(int8[2, 3] x) => (float[2, 3] y)"
REFUSED = {
    "another scale": (ROW, f"d = {DQ}(x, s, z) q = {Q}(d, u, z) y = {DQ}(q, u, z)", "its parameters differ"),
    "another zero point": (
        ROW,
        f"d = {DQ}(x, s, z) q = {Q}(d, s, o) y = {DQ}(q, s, o)",
        "its parameters differ",
    ),
    "another type": (ROW, f"d = {DQ}(x, s, z) q = {Q}(d, s, uz) y = {DQ}(q, s, uz)", "its parameters differ"),
    "a scale of 0": (
        ROW,
        f"d = {DQ}(x, nought) q = {Q}(d, nought, o) y = {DQ}(q, s)",
        "is not a usable number",
    ),
    "a computed scale": (
        "(int8[2, 3] x, float r) => (float[2, 3] y)",
        f"d = {DQ}(x, r) q = {Q}(d, r, o) y = {DQ}(q, s)",
        "its scale is not a constant float",
    ),
    "too few mantissa bits": (
        "(int16[2, 3] x) => (float[2, 3] y)",
        f"d = {DQ}(x, half) q = {Q}(d, half, w16) y = {DQ}(q, s, w16)",
        "its parameters differ",
    ),
    "fewer digits than bits": (
        "(int16[2, 3] x) => (int16[2, 3] y)",
        f"d = {DQ}(x, half, w16) q = {Q}(d, half, w16) y = Transpose<perm = [0, 1]>(q)",
        "too few mantissa bits for 16-bit values",
    ),
    "an axis that a reshape changes": (
        "(int8[2, 3] x) => (float[6] y)",
        f"d = {DQ}<axis = 1>(x, s3) r = Reshape(d, sixes) y = Abs(r)",
        "Reshape changes the axis of its scales",
    ),
    "an axis that is joined": (
        "(int8[1, 3] x) => (float[2, 3] y)",
        f"a = {DQ}<axis = 0>(x, s2) b = {DQ}<axis = 0>(x, s2) c = Concat<axis = 0>(a, b) y = Abs(c)",
        "Concat changes the axis of its scales",
    ),
    "an axis that is picked from": (
        "(int8[2, 3] x) => (float[2, 2] y)",
        f"d = {DQ}<axis = 1>(x, s3) g = Gather<axis = 1>(d, rows) y = Abs(g)",
        "Gather changes the axis of its scales",
    ),
    "read twice": (
        ROW,
        f"d = {DQ}(x, s) a = Reshape(d, flat) b = Abs(d) y = Add(a, b)",
        "has other consumers",
    ),
    "joined with a float": (
        "(int8[2, 3] x, float[2, 3] w) => (float[4, 3] y)",
        f"a = {DQ}(x, s) c = Concat<axis = 0>(a, w) y = Abs(c)",
        "some of its operands are not dequantized",
    ),
    "joined with another scale": (
        "(int8[2, 3] x, int8[2, 3] w) => (float[4, 3] y)",
        f"a = {DQ}(x, s) b = {DQ}(w, u) c = Concat<axis = 0>(a, b) y = Abs(c)",
        "different quantization parameters",
    ),
    "a weight": (
        "(float[6] x) => (float[6] y)",
        f"d = {DQ}(W, s) r = Reshape(d, flat) y = Add(x, r)",
        "its operand is a weight",
    ),
    "an order that turns round": (
        "(int8[1, 2, 4] x) => (float[1, 2, 2] y)",
        f"d = {DQ}(x, minus) m = MaxPool<kernel_shape = [3]>(d) y = Abs(m)",
        "needs positive scales",
    ),
    "between pairs of other parameters": (
        "(float[2, 3] x) => (float[6] y)",
        f"a = {Q}(x, s, z) b = {DQ}(a, s, z) r = Reshape(b, flat) c = {Q}(r, u, z) y = {DQ}(c, u, z)",
        "onnxruntime would merge the pairs before and behind it",
    ),
    "quantized behind what others read": (
        "(float[2, 3] x) => (int8[3, 2] y, float[3, 2] w)",
        f"a = Transpose<perm = [1, 0]>(x) y = {Q}(a, s, z) w = Abs(a)",
        "has other consumers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_have_reasons(name: str) -> None:
    signature, body, reason = REFUSED[name]
    model, same = (with_shapes(signature, body) for _ in range(2))
    (said,) = apply(MoveQDQPass(), model)
    assert reason in said
    assert_same(model, same)


@pytest.mark.parametrize("between", ["Transpose<perm = [1, 0]>(d)", "Reshape(d, same)"])
def test_a_weight_of_floats_is_not_moved_next_to_its_product(between: str) -> None:
    """In graphs other than decoders, onnxruntime's defaults keep the source's numbers."""
    text = f"""<ir_version: 8, opset_import: ["": 17]> g (float[4, 3] x) => (float[4, 3] y)
        {{ d = {DQ}<axis = 0>(W, s3) e = {between} y = MatMul(x, e) }}"""
    weight = RNG.integers(-127, 128, (3, 3)).astype(np.int8)
    arrays = {"W": weight, "s3": GIVEN["s3"]} | ({"same": np.array([3, 3])} if "same" in between else {})
    tensors = [ir.tensor(array, name=name) for name, array in arrays.items()]
    feed = {"x": RNG.normal(0, 1, (4, 3)).astype(np.float32)}
    expected = default_run(ir.from_onnx_text(text, initializers=tensors), feed, "ORT_ENABLE_ALL")
    optimized, report = run(ir.from_onnx_text(text, initializers=tensors), model_passes())
    np.testing.assert_allclose(default_run(optimized, feed, "ORT_ENABLE_ALL"), expected, rtol=1e-5, atol=1e-6)
    assert any("would round the floats" in refusal.reason for _, refusal in report.refusals)


def test_a_weight_of_quantized_values_is_moved_next_to_its_product() -> None:
    text = f"""g (float[4, 2] x) => (float[4, 2] y) {{ q = {Q}(x, s, z) a = {DQ}(q, s, z)
        d = {DQ}(V, s) e = Transpose<perm = [1, 0]>(d) y = MatMul(a, e) }}"""
    optimized, _ = run(graph(text, **(GIVEN | {"V": np.eye(2, dtype=np.int8)})), model_passes())
    assert [node.op_type for node in optimized.graph].count("Transpose") == 0


def test_a_weight_reaches_its_canonical_form() -> None:
    signature, before, _ = MOVES["a weight"]
    model = with_shapes(signature, before)
    apply(MoveQDQPass(), model)
    apply(FoldTransposesPass(), model)
    expected = graph(
        f"g {signature} {{ d = {DQ}<axis = 1>(V, s2) y = MatMul(x, d) }}",
        V=np.ascontiguousarray(GIVEN["W"].T), s2=GIVEN["s2"],
    )  # fmt: skip
    assert_same(model, expected)


def test_canonical_quantized_forms_stay() -> None:
    body = f"""e = {DQ}<axis = 1, block_size = 3>(W, b) h = Gather(e, i) q = {Q}(h, s, z) d = {DQ}(q, s, z)
        w = {DQ}<axis = 1>(V, s2) m = MatMul(d, w)
        kq = {Q}<axis = 2>(m, s2, z2) kd = {DQ}<axis = 2>(kq, s2, z2)
        y, k, v = Attention<q_num_heads = 1, kv_num_heads = 1>(m, kd, kd)"""
    text = f"g (int64[N, S] i) => (float[N, S, 2] y) {{ {body} }}"
    arrays = GIVEN | {"V": np.ascontiguousarray(GIVEN["W"].T), "b": np.ones((2, 1), np.float32)}
    model = graph(text, **arrays)
    assert apply(MoveQDQPass(), model) == []
    assert_same(model, graph(text, **arrays))


def test_equal_quantizations_are_merged() -> None:
    body = f"""a = {Q}(x, s, z) b = {Q}(x, t, z) c = {DQ}(a, s, z) d = {DQ}(b, t, z) y = Add(c, d)"""
    model, _ = run(case("(float[2] x) => (float[2] y)", body), canonical_passes())
    assert sorted(node.op_type for node in model.graph) == ["Add", DQ, Q]


def test_subgraphs_are_rewritten() -> None:
    body = f"""r = Constant<value = float {{0.1}}>() n = Constant<value = int8 {{3}}>()
        y = If(c) <then_branch = yes () => (int8[2] a) {{ d = {DQ}(x, r, n) e = {Q}(d, r, n)
        a = Transpose<perm = [0]>(e) }}, else_branch = no () => (int8[2] b) {{ b = Identity(x) }}>"""
    model = case("(int8[2] x, bool c) => (int8[2] y)", body)
    assert apply(MoveQDQPass(), model) == []
    then = model.graph[-1].attributes["then_branch"].as_graph()
    assert [node.op_type for node in then] == ["Transpose"]


MOVERS = (
    "Transpose<perm = [1, 0]>({})", "Reshape({}, flat)", "Unsqueeze({}, one)", "Gather<axis = 0>({}, rows)",
          "Slice({}, ends, two, ends)", "Concat<axis = 0>({}, {})", "Squeeze({})")  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.sampled_from([*MOVERS, "up", "pair", "down"]), min_size=1, max_size=7),
    axis=st.sampled_from([None, 0, 1]),
    scale=st.floats(2**-12, 8, width=32),
)
def test_any_chain_keeps_its_numbers(steps: list[str], axis: int | None, scale: float) -> None:
    """The results of valid chains stay bit-identical."""
    size = {None: (), 0: (3,), 1: (4,)}[axis]
    arrays = GIVEN | {
        "s": (np.full(size, scale) * (1 + np.arange(np.prod(size))).reshape(size)).astype(np.float32),
        "z": RNG.integers(-9, 9, size, np.int8) if size else np.int8(-7),
    }
    at = "" if axis is None else f"<axis = {axis}>"
    lines, last = [f"q0 = {Q}{at}(x, s, z)", f"v0 = {DQ}{at}(q0, s, z)"], "v0"
    for number, step in enumerate(steps, 1):
        new = f"v{number}"
        if step in ("up", "pair", "down"):
            lines += [f"q{number} = {Q}{at}({last}, s, z)", f"{new} = {DQ}{at}(q{number}, s, z)"]
        else:
            lines.append(f"{new} = " + step.replace("{}", last))
        last = new
    text = f"g (float[3, 4] x) => (float y) {{ {' '.join(lines)} y = Abs({last}) }}"
    model = graph(text, **arrays)
    feed = {"x": RNG.normal(0, 5, (3, 4)).astype(np.float32)}
    try:
        expected = evaluate(model, feed)[0]
        model = ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(model), data_prop=True))
    except Exception:  # noqa: BLE001 -- not every chain fits the shapes
        return
    if axis is not None and any(
        node.op_type == Q and node.outputs[0].shape is not None and node.outputs[0].shape[axis] != size[0]
        for node in model.graph
    ):
        return
    apply(MoveQDQPass(), model)
    np.testing.assert_array_equal(evaluate(model, feed)[0], expected)


PAIRS = {"a": ("s", "uz"), "b": ("u", "uz"), "c": ("s", "uo"), "d": ("u", "uo")}
NO_EFFECT = ("Reshape({}, same)", "Slice({}, ends, three, ends)", "Concat<axis = 0>({})", "Abs({})")
TURNS = ("Transpose<perm = [1, 0]>({})", "Reshape({}, flat)", "Unsqueeze({}, one)", "Squeeze({}, one)")


def default_run(model: ir.Model, feed: dict[str, Any], level: str) -> Any:
    """Run in onnxruntime, whose optimizations of ``level`` are enabled."""
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    proto = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"]).run(None, feed)[0]


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    before=st.sampled_from("abcd"),
    steps=st.lists(st.sampled_from((*NO_EFFECT, *TURNS, *PAIRS)), min_size=1, max_size=4),
    behind=st.sampled_from("abcd"),
)
def test_pairs_of_other_parameters_are_not_made_neighbours(
    before: str, steps: list[str], behind: str
) -> None:
    """Where onnxruntime's defaults keep the source's numbers, they keep the optimized graph's."""
    if any(a in PAIRS and b in PAIRS and a != b for a, b in itertools.pairwise([before, *steps, behind])):
        return  # the source has them
    lines, last = [], "x"
    for number, step in enumerate([before, *steps, behind]):
        new = f"v{number}"
        if step in PAIRS:
            scale, zero = PAIRS[step]
            lines += [
                f"q{number} = {Q}({last}, {scale}, {zero})",
                f"{new} = {DQ}(q{number}, {scale}, {zero})",
            ]
        else:
            lines.append(f"{new} = " + step.replace("{}", last))
        last = new
    arrays = GIVEN | {"uo": np.uint8(9), "same": np.array([3, 4])}
    text = f"g (float[3, 4] x) => (float y) {{ {' '.join(lines)} y = Identity({last}) }}"
    feed = {"x": RNG.normal(0, 5, (3, 4)).astype(np.float32)}
    try:
        expected = default_run(graph(text, **arrays), feed, "ORT_DISABLE_ALL")
    except Exception:  # noqa: BLE001 -- not every chain fits the shapes
        return
    if not np.array_equal(default_run(graph(text, **arrays), feed, "ORT_ENABLE_ALL"), expected):
        return  # onnxruntime changes the source
    optimized, _ = run(graph(text, **arrays), model_passes())
    np.testing.assert_array_equal(default_run(optimized, feed, "ORT_ENABLE_ALL"), expected)
