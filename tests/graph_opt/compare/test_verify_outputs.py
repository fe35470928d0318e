"""``verify`` on outputs of each kind: floats by slices, integers, NaN, constants, sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from forests import zipped_forest
from small_graphs import binary_head, encoder

from carryall.errors import VerificationError
from carryall.graph_opt.compare.bars import Bars
from carryall.graph_opt.compare.report import VerifyReport
from carryall.graph_opt.compare.tally import Tally
from carryall.graph_opt.compare.verify import verify

pytest.importorskip("onnxruntime")
HEAD = '<ir_version: 10, opset_import: ["": 20]> g'


def net(text: str, **weights: npt.NDArray[Any]) -> ir.Model:
    tensors = [ir.tensor(array, name=name) for name, array in weights.items()]
    return ir.from_onnx_text(f"{HEAD} {text}", initializers=tensors)


def compared(a: str, b: str, inputs: Any = None, bars: Bars | None = None) -> VerifyReport:
    return verify(net(a), net(b), inputs, bars, names=("A", "B"))


def test_a_constant_instead_of_the_only_logit_fails() -> None:
    constant = binary_head()
    node = next(node for node in constant.graph if node.op_type == "Gemm")
    zeros = ir.tensor(np.zeros((16, 1), np.float32), name="l_w")
    constant.graph.initializers["l_w"].const_value = zeros
    assert node.inputs[1] is constant.graph.initializers["l_w"]
    found = verify(binary_head(), constant, names=("A", "B"))
    assert found.tokens is None  # one column is not a vocabulary
    with pytest.raises(VerificationError, match="B differs from A: output logits is constant"):
        found.check()


def test_a_constant_near_the_mean_of_a_nearly_constant_output_fails() -> None:
    varying = "(float[batch, 4] x) => (float[batch, 4] y) <float s = {0.001}, float c = {50}> "
    found = compared(varying + "{ t = Mul(x, s) y = Add(t, c) }", varying + "{ t = Sub(x, x) y = Add(t, c) }")
    assert found.failures == ("output y is constant, but the reference's depends on the inputs",)
    assert not compared(
        varying + "{ t = Mul(x, s) y = Add(t, c) }", varying + "{ t = Mul(x, s) u = Add(t, s) y = Add(u, c) }"
    ).passed


def test_a_column_of_small_numbers_has_its_own_range() -> None:
    text = "(float[batch, 2] x) => (float[batch, 2] y) <float[2] w = {1000.0, SMALL}> { y = Mul(x, w) }"
    found = compared(text.replace("SMALL", "0.01"), text.replace("SMALL", "0.02"))
    assert not found.passed
    assert found.outputs["y"].max_rel == pytest.approx(1, rel=0.3)
    assert compared(text.replace("SMALL", "0.01"), text.replace("SMALL", "0.010000001")).passed


@pytest.mark.parametrize(("error", "passed"), [(1.5e-7, True), (1e-5, False)])
def test_a_column_of_a_saturated_output_may_differ_by_rounding_of_the_whole(
    error: float, passed: bool
) -> None:
    """onnxruntime's sigmoid of -90 is 0 or 1e-7, by the kernel."""
    reference = np.array([[0, 0.2, 1], [0, 0.9, 0.5]], np.float32)
    tally = Tally()
    tally.add(reference, reference + np.array([error, 0, 0], np.float32))
    assert (tally.result(Bars()).reason is None) == passed


@pytest.mark.parametrize(("scale", "passed"), [(1.0, True), (1.03, False)])
def test_probabilities_far_below_1_may_differ_by_rounding_of_1(scale: float, passed: bool) -> None:
    """A kernel computes them as 1/2 + f(x), so that all of them have the rounding error of 1/2."""
    head = f"(float[2, 4] x) => (float[4, 2] y) <float s = {{{scale}}}, float e = {{3e-7}}>"
    feed = {"x": np.array([[-4, -5, -6, -7], [-14, -15, -16, -15]], np.float32)}
    found = compared(
        "(float[2, 4] x) => (float[4, 2] y) { u = Sigmoid(x) y = Transpose(u) }",
        f"{head} {{ t = Mul(x, s) u = Sigmoid(t) v = Sub(u, e) y = Transpose(v) }}",
        feed,
    )
    assert found.passed == passed, found.failures


def test_nan_in_the_same_elements_is_equal_and_reported() -> None:
    text = "(float[batch, 3] x) => (float[batch, 3] y) { y = OP(x) }"
    feed = {"x": np.array([[4, -1, 9]], np.float32)}
    same = compared(text.replace("OP", "Sqrt"), text.replace("OP", "Sqrt"), feed)
    assert same.passed
    assert "y: NaN in the same 1 of 3 places of both, counted as equal" in same.text()
    other = compared(
        text.replace("OP", "Sqrt"), text.replace("OP", "Abs"), {"x": np.array([[1, -1, 1]], np.float32)}
    )
    assert other.failures == ("output y is NaN in 1 elements of only one of the two",)


def test_infinities_must_have_the_same_sign() -> None:
    text = "(float[batch, 2] x) => (float[batch, 2] y) <float one = {1}> { y = Div(one, x) }"
    feed = {"x": np.array([[0, 1]], np.float32)}
    same = compared(text, text, feed)
    assert same.passed
    assert "the same infinity in 1 of 2 places" in same.text()
    assert "is infinite in 1 elements" in str(compared(text, text.replace("{1}", "{-1}"), feed).failures)


def test_integers_must_be_equal() -> None:
    text = "(float[batch, 4] x) => (int64[batch, 4] y) { t = OP(x) y = Cast<to = 7>(t) }"
    floor, ceiling, nearest = (text.replace("OP", op) for op in ("Floor", "Ceil", "Round"))
    feed = {"x": np.array([[0.4, 0.6, 1.6, 2.5]], np.float32)}
    assert compared(floor, floor, feed).passed
    found = compared(floor, ceiling, feed)
    assert found.failures == ("output y differs in 4 of 4 elements, by 1 at most (--max-mismatch)",)
    assert compared(floor, nearest, feed, Bars(max_mismatch=0.5)).passed
    assert not compared(floor, nearest, feed, Bars(max_mismatch=0.25)).passed


def test_elements_of_sequences_are_compared() -> None:
    text = """(float[batch, 4] x) => (seq(float[batch, 2]) y) <int64[2] parts = {2, 2}>
        { t = OP(x) y = SplitToSequence<axis = 1>(t, parts) }"""
    assert compared(text.replace("OP", "Neg"), text.replace("OP", "Neg")).passed
    found = compared(text.replace("OP", "Neg"), text.replace("OP", "Abs"))
    assert {reason.split()[1] for reason in found.failures} == {"y[0]", "y[1]"}


@pytest.mark.long
def test_maps_are_compared_by_keys_and_values(tmp_path: Path) -> None:
    """Maps are compared as tables [rows, keys], so that a small probability has its column's range."""

    def report(**changes: Any) -> VerifyReport:
        for name, model in (("a", zipped_forest()), ("b", zipped_forest(**changes))):
            onnx.save(model, tmp_path / f"{name}.onnx")
        return verify(tmp_path / "a.onnx", tmp_path / "b.onnx")

    same = report()
    assert same.passed
    assert set(same.outputs) == {"label", "zipped", "zipped, keys"}
    assert "512, 5" in same.text()
    assert "keys" not in same.text()
    assert report(scale=1.0005).passed
    assert report(scale=1.01).failures[0].startswith("output zipped has relative error")
    (renamed,) = report(names=("ham", "perhaps", "spam")).failures
    assert renamed.startswith("output zipped, keys differs in")
    reordered = report(names=("spam", "maybe", "ham")).failures
    assert reordered[0].startswith("output zipped has relative error")


def test_sequences_of_another_length_fail() -> None:
    text = """(float[batch, 4] x) => (seq(float[batch, n]) y) <int64[N] parts = {P}>
        { y = SplitToSequence<axis = 1>(x, parts) }"""
    two, three = text.replace("N", "2").replace("P", "2, 2"), text.replace("N", "3").replace("P", "2, 1, 1")
    assert "output y[2] is not an output of the reference" in compared(two, three).failures
    assert "output y[2] is missing" in compared(three, two).failures


def test_a_missing_output_and_another_type_fail() -> None:
    both = "(float[b, 2] x) => (float[b, 2] y, float[b, 2] z) { y = Neg(x) z = Abs(x) }"
    one = "(float[b, 2] x) => (float[b, 2] y) { y = Neg(x) }"
    assert compared(both, one).failures == ("the candidate has no output z", "output z is missing")
    whole = "(float[b, 2] x) => (int32[b, 2] y) { t = Neg(x) y = Cast<to = 6>(t) }"
    assert "has type int32 instead of float32" in str(compared(one, whole).failures)


def test_a_nearly_constant_reference_is_reported() -> None:
    text = "(float[b, 2] x) => (float[b, 2] y) { t = Sub(x, x) y = Exp(t) }"
    assert "constant in the reference for all inputs" in compared(text, text).text()


def test_the_reference_s_rounding_error_is_allowed() -> None:
    """Half of the output is a difference of large numbers, which depends on the order of the sum."""
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((64, 64)) * 1000).astype(np.float32)
    change = rng.standard_normal(w.shape).astype(np.float32) * np.float32(0.03)
    head = "(float[b, 64] x) => (float[b, 128] y)"
    body = "t = MatMul(s, w) u = MatMul(s, v) d = Sub(t, u) y = Concat<axis = 1>(t, d)"
    order = rng.permutation(64)
    reference = net(f"{head} {{ s = Identity(x) {body} }}", w=w, v=w + change)
    sorted_sum = net(
        f"{head} {{ s = Gather<axis = 1>(x, o) {body} }}", w=w[order], v=(w + change)[order], o=order
    )
    found = verify(reference, sorted_sum)
    assert found.outputs["y"].max_rel > found.outputs["y"].bar
    assert found.passed
    assert "is allowed: it is within 10 times the measured rounding" in found.text()
    wrong = net(f"{head} {{ s = Identity(x) {body} }}", w=w, v=w + np.float32(1.2) * change)
    assert not verify(reference, wrong).passed


@pytest.mark.parametrize(("fault", "passed"), [(0.0, True), (0.01, False)])
def test_the_rounding_error_of_single_elements_is_allowed(fault: float, passed: bool) -> None:
    """Samples of audio near zero: rounding the weights of the reference once changes only some of them."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(400).astype(np.float32)
    x[:10] *= np.float32(0.01)
    a, b = (1000 + rng.random((2, 400))).astype(np.float32)
    moved = b.copy()
    moved[3] += np.float32(fault)
    text = "(float[400] x) => (float[400] y) {{ {} }}"
    inexact = net(text.format("t = Add(x, a) y = Sub(t, b)"), a=a, b=b)
    exact = net(text.format("t = Sub(a, b) y = Add(x, t)"), a=a, b=moved)
    found = verify(inexact, exact, inputs=[{"x": x}])
    assert found.outputs["y"].max_rel > found.outputs["y"].bar
    assert found.passed == passed


def test_the_json_has_no_bare_nan_and_no_temporary_name() -> None:
    text = "(float[b, 2] x) => (float[b, 2] y) { y = OP(x) }"
    found = compared(text.replace("OP", "Sqrt"), text.replace("OP", "Neg"))

    def refuse(word: str) -> None:
        raise AssertionError(word)

    document = json.loads(found.to_json(), parse_constant=refuse)
    assert (document["reference"], document["candidate"], document["passed"]) == ("A", "B", False)
    assert "/tmp" not in found.to_json() + str(found.failures)


@pytest.mark.parametrize(
    ("name", "content"),
    [("lowest", 0.0), ("lowest", -1.0), ("one_f", 0.999)],
)
def test_wrong_masks_are_caught(name: str, content: float) -> None:
    wrong = encoder()
    wrong.graph.initializers[name].const_value = ir.tensor(np.array(content, np.float32), name=name)
    assert not verify(encoder(), wrong).passed


X, Y, YZ = "(float[b, 2] x)", "(float[b, 2] y)", "(float[b, 2] y, float[b, 2] z)"


@pytest.mark.parametrize(
    ("reference", "candidate", "change"),
    [
        (f"{X} => {Y} {{ y = Neg(x) }}", f"{X} => (float[b, 2] z) {{ z = Neg(x) }}", "has no output y"),
        (f"{X} => {Y} {{ y = Neg(x) }}", f"(float[b, 2] z) => {Y} {{ y = Neg(z) }}", "has no input x"),
        (f"{X} => {Y} {{ y = Neg(x) }}", f"(float[b, 2] x, float[b, 2] z) => {Y} {{ y = Sub(z, x) }}",
         "has a new input z"),
        (f"{X} => {Y} {{ y = Neg(x) }}", f"{X} => {YZ} {{ y = Neg(x) z = Abs(x) }}", "has a new output z"),
        (f"{X} => {YZ} {{ y = Neg(x) z = Abs(x) }}",
         f"{X} => (float[b, 2] z, float[b, 2] y) {{ y = Neg(x) z = Abs(x) }}",
         "has its outputs in another order: z, y"),
        (f"{X} => {Y} {{ y = Neg(x) }}", f"{X} => (double[b, 2] y) {{ t = Neg(x) y = Cast<to = 11>(t) }}",
         "has output y of type tensor(double) instead of tensor(float)"),
        (f"{X} => {Y} {{ y = Neg(x) }}", "(float[b, 3] x) => (float[b, 3] y) { y = Neg(x) }",
         "has input x of shape ['b', 3] instead of ['b', 2]"),
    ],
)  # fmt: skip
def test_a_changed_interface_fails_first(reference: str, candidate: str, change: str) -> None:
    found = compared(reference, candidate)
    assert found.failures[0] == f"the candidate {change}"
    assert found.text().startswith(f"the candidate {change}")
    assert change in json.loads(found.to_json())["interface"]


def test_renamed_outputs_are_paired() -> None:
    text = "(float[b, 2] x) => (float[b, 2] y) { y = Neg(x) }"
    found = compared(text, text.replace("y", "renamed"))
    assert found.interface == ("has no output y", "has a new output renamed")
    assert found.outputs["y"].reason is None
    assert compared(text, text.replace("y", "renamed").replace("Neg", "Abs")).outputs["y"].reason is not None


def test_a_random_reference_is_reported() -> None:
    text = "(float[b, 3] x) => (float[b, 3] y) { n = RandomNormalLike(x) y = Add(x, n) }"
    found = compared(text, text)
    assert not found.passed
    assert "A gives different results at each run on the same inputs" in found.text()


WEIGHT = np.random.default_rng(3).integers(-127, 128, (32, 64)).astype(np.int8)
STEPS = np.full(32, 0.01, np.float32)
HEAD_OF_FLOATS = "(float[b, 64] x) => (float[b, 32] y)"


def test_products_that_only_onnxruntime_s_defaults_round_are_found() -> None:
    """DequantizeLinear next to MatMul becomes MatMulNBits, which rounds x to 8 bits."""
    exact = net(
        f"{HEAD_OF_FLOATS} {{ d = DequantizeLinear<axis = 0>(w, s) t = Transpose<perm = [1, 0]>(d) "
        "y = MatMul(x, t) }",
        w=WEIGHT, s=STEPS,
    )  # fmt: skip
    rounded = net(
        f"{HEAD_OF_FLOATS} {{ d = DequantizeLinear<axis = 1>(w, s) y = MatMul(x, d) }}",
        w=np.ascontiguousarray(WEIGHT.T), s=STEPS,
    )  # fmt: skip
    (failure,) = verify(exact, rounded).failures
    assert failure.startswith("output y, under onnxruntime's defaults, has relative error")
    assert verify(rounded, rounded).passed  # the reference is rounded as well
    assert verify(rounded, exact).passed


def test_pairs_that_only_onnxruntime_s_defaults_merge_are_found() -> None:
    pair = "{0} = QuantizeLinear({1}, {2}, z) {3} = DequantizeLinear({0}, {2}, z)"
    arrays: dict[str, Any] = {"u": np.float32(0.05), "v": np.float32(0.1), "z": np.uint8(3)}
    head, turn = "(float[6, 8] x) => (float[8, 6] y)", "Transpose<perm = [1, 0]>"
    first, second = pair.format("p", "{}", "u", "d"), pair.format("q", "{}", "v", "y")
    apart = net(f"{head} {{ {first.format('x')} t = {turn}(d) {second.format('t')} }}", **arrays)
    beside = net(f"{head} {{ t = {turn}(x) {first.format('t')} {second.format('d')} }}", **arrays)
    (failure,) = verify(apart, beside).failures
    assert failure.startswith("output y, under onnxruntime's defaults, has relative error")
    assert verify(beside, beside).passed
