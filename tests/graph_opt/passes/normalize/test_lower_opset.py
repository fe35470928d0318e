"""Models newer than the contract's opset 23 come down to it, or say why they cannot."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, assert_same, evaluate, graph

from carryall.errors import GraphError
from carryall.graph_opt.lower.older_opset import OlderOpsetPass
from carryall.graph_opt.passes.normalize.lower_opset import LowerOpsetPass, WriteSwishPass
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import model_passes, portable_passes

SIGNATURE = "g (float[2, 3] x) => (float[2, 3] y)"


def model(body: str, opset: int, signature: str = SIGNATURE) -> ir.Model:
    return ir.from_onnx_text(f'<ir_version: 11, opset_import: ["" : {opset}]> {signature} {{ {body} }}')


@pytest.mark.parametrize("opset", [24, 25, 26, 28])
def test_what_needs_no_newer_opset_claims_23(opset: int) -> None:
    newer = model("s = Shape(x) r = Reshape(x, s) a, b = TopK(r, s) y = Softmax(r)", opset)
    assert apply(LowerOpsetPass(), newer) == []
    assert newer.opset_imports[""] == 23


NEWER = {
    "an operator": (
        "c = CumProd(x, x) y = Neg(c)",
        26,
        "it needs opset 26: opset 23 does not have this operator",
    ),
    "an input": (
        "y = Attention<q_num_heads = 1, kv_num_heads = 1>(x, x, x, , , , x)",
        24,
        "allows fewer inputs or outputs",
    ),
    "an attribute": (
        "y = Attention<q_num_heads = 1, kv_num_heads = 1, left_window_size = 3>(x, x, x)",
        25,
        "does not have the attribute left_window_size",
    ),
    "other results": ("y = Mod(x, x)", 28, "requires the attribute fmod"),
}


@pytest.mark.parametrize("case", NEWER)
def test_what_needs_a_newer_opset_keeps_it_and_a_target_says_which(case: str) -> None:
    body, opset, reason = NEWER[case]
    newer = model(body, opset)
    assert [reason in said for said in apply(LowerOpsetPass(), newer)] == [True]
    assert newer.opset_imports[""] == opset
    with pytest.raises(GraphError, match=rf"needs opset {opset}, but the target supports opsets up to 21: "):
        OlderOpsetPass(21)(newer)


def test_types_and_graphs_inside_nodes_count() -> None:
    wide = model("y, b = TopK(h, k)", 24, "g (bfloat16[4] h, int64[1] k) => (bfloat16[1] y)")
    assert "does not allow tensor(bfloat16)" in apply(LowerOpsetPass(), wide)[0]
    inside = """y = If(c) <then_branch = t () => (float[2, 3] a) { a = CumProd(x, i) },
        else_branch = e () => (float[2, 3] b) { b = Abs(x) }>"""
    branch = model(inside, 26, "g (float[2, 3] x, bool c, int64 i) => (float[2, 3] y)")
    assert len(apply(LowerOpsetPass(), branch)) == 1


@pytest.mark.parametrize("alpha", ["", "<alpha = 1.5>"])
def test_swish_is_written_in_its_canonical_form(alpha: str) -> None:
    newer, before = (model(f"y = Swish{alpha}(x)", 24) for _ in range(2))
    result, _ = run(newer, portable_passes())
    scaled, given = ("z = Mul(x, k)", {"k": np.float32(1.5)}) if alpha else ("z = Identity(x)", {})
    expected = graph(f"{SIGNATURE} {{ {scaled} s = Sigmoid(z) y = Mul(x, s) }}", **given)
    assert_same(result, run(expected, portable_passes())[0])
    assert result.opset_imports[""] == 23
    feed = {"x": np.array([[-2, -0.5, 0], [0.25, 1, 30]], np.float32)}
    np.testing.assert_allclose(evaluate(result, feed)[0], evaluate(before, feed)[0], rtol=1e-6)


def test_swish_of_an_unknown_type_stays() -> None:
    newer = model("h = Unknown(x) s = Swish<alpha = 2.0>(h) y = Cast<to = 1>(s)", 24)
    assert apply(WriteSwishPass(), newer) == ["the type of its input is unknown"]


@pytest.mark.parametrize(
    ("body", "given", "claimed"),
    [
        ("y = Relu(x)", 11, 18),
        ("y = Relu(x)", 20, 20),
        ("y = Relu(x)", 28, 23),
        ("y = Gelu(x)", 20, 20),
        ("h = Relu(x) y = CumProd(h, i)", 26, 26),
    ],
)
def test_a_graph_that_is_no_decoder_claims_the_oldest_opset_that_holds_it(
    body: str, given: int, claimed: int
) -> None:
    found = model(body, given, "g (float[2, 3] x, int64 i) => (float[2, 3] y)")
    result, report = run(found, model_passes(), debug=True)
    assert result.opset_imports[""] == claimed
    assert [refusal for _, refusal in report.refusals] == []


def test_what_was_fused_counts() -> None:
    given = {"root": np.float32(np.sqrt(2)), "one": np.float32(1), "half": np.float32(0.5)}
    body = "d = Div(x, root) e = Erf(d) f = Add(e, one) p = Mul(x, f) y = Mul(p, half)"
    found = graph(f"{SIGNATURE} {{ {body} }}", **given)
    found.opset_imports[""] = 18
    result, _ = run(found, model_passes())
    assert [node.op_type for node in result.graph] == ["Gelu"]
    assert result.opset_imports[""] == 20


def test_grids_of_another_meaning_are_not_lowered() -> None:
    found = model(
        "y = GridSample(x, g)", 18, "g (float[1, 1, 4, 4] x, float[1, 2, 2, 2] g) => (float[1, 1, 2, 2] y)"
    )
    result, _ = run(found, model_passes())
    assert result.opset_imports[""] == 20
