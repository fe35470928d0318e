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
