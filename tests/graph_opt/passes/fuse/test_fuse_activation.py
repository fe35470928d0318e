from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.passes.fuse.fuse_activation import FuseActivationPass

SIGNATURE = "g (float[N] x) => (float[N] y) <float[N] o>"
GIVEN = {
    "half": np.float32(0.5),
    "one": np.float32(1),
    "root": np.float32(np.sqrt(2)),
    "k": np.float32(np.sqrt(2 / np.pi)),
    "c": np.float32(0.044715),
}
EXACT = "d = Div(x, root) e = Erf(d) f = Add(e, one) p = Mul(x, f) y = Mul(p, half)"
TANH = """s = Mul(x, x) q = Mul(x, s) r = Mul(c, q) a = Add(x, r) b = Mul(k, a) t = Tanh(b) f = Add(one, t)
    p = Mul(x, f) y = Mul(half, p)"""


@pytest.mark.parametrize(("text", "kind"), [(EXACT, "none"), (TANH, "tanh")])
def test_gelu_is_recognised_by_its_values(text: str, kind: str) -> None:
    model = graph(f"{SIGNATURE} {{ {text} }}", **GIVEN)
    apply(FuseActivationPass(), model)
    assert_same(model, graph(f'{SIGNATURE} {{ y = Gelu <approximate = "{kind}"> (x) }}'))


def test_another_function_stays() -> None:
    model = graph(f"{SIGNATURE} {{ t = Tanh(x) y = Mul(t, half) }}", **GIVEN)
    apply(FuseActivationPass(), model)
    assert [node.op_type for node in model.graph] == ["Tanh", "Mul"]


CLIPPED = "g (float[N] x) => (float[N] y) <float[N] a, float[N] c, float[N] m>"
HARD = {"three": np.float32(3), "zero": np.float32(0), "six": np.float32(6), "sixth": np.float32(1 / 6)}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a = Add(x, three) c = Clip(a, zero, six) m = Mul(x, c) y = Div(m, six)", "y = HardSwish(x)"),
        ("a = Add(three, x) c = Clip(a, zero, six) m = Mul(c, sixth) y = Mul(m, x)", "y = HardSwish(x)"),
        ("c = HardSigmoid <alpha = 0.16666667> (x) y = Mul(x, c)", "y = HardSwish(x)"),
        ("a = Add(x, three) c = Clip(a, zero, six) y = Div(c, six)",
         "y = HardSigmoid <alpha = 0.16666667, beta = 0.5> (x)"),
    ],
)  # fmt: skip
def test_hard_swish_and_hard_sigmoid(body: str, expected: str) -> None:
    model = graph(f"{CLIPPED} {{ {body} }}", **HARD)
    apply(FuseActivationPass(), model)
    assert_same(model, graph(f"{CLIPPED} {{ {expected} }}"))


@pytest.mark.parametrize(
    "body",
    [
        "a = Add(x, three) c = Clip(a, zero, three) m = Mul(x, c) y = Div(m, six)",
        "a = Add(x, six) c = Clip(a, zero, six) m = Mul(x, c) y = Div(m, six)",
        "c = HardSigmoid <alpha = 0.2> (x) y = Mul(x, c)",
        "a = Add(x, three) y = Clip(a, zero, six)",
    ],
)
def test_other_clipped_functions_stay(body: str) -> None:
    model, before = (graph(f"{CLIPPED} {{ {body} }}", **HARD) for _ in range(2))
    apply(FuseActivationPass(), model)
    assert_same(model, before)
