from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import apply, assert_same, evaluate, graph

from carryall.graph_opt.passes.normalize.fold_pads import FoldPadsPass

SIGNATURE = "g (float[1, 2, 4, 5] x) => (float[1, 3, h, w] y)"
GIVEN = {
    "k": np.random.default_rng(0).standard_normal((3, 2, 3, 3)).astype(np.float32),
    "zeros": np.array([0, 0, 1, 2, 0, 0, 0, 3]),
    "deep": np.array([0, 1, 1, 2, 0, 0, 0, 3]),
    "less": np.array([0, 0, -1, 2, 0, 0, 0, 3]),
    "zero": np.float32(0),
    "one": np.float32(1),
    "axes": np.array([0, 1, 2, 3]),
}


@pytest.mark.parametrize("call", ["Pad(x, zeros)", "Pad(x, zeros, zero)"])
@pytest.mark.parametrize(
    ("own", "pads"), [("", [1, 2, 0, 3]), ("<pads = [1, 0, 1, 0]>", [2, 2, 1, 3])], ids=["none", "some"]
)
def test_zeros_become_pads(call: str, own: str, pads: list[int]) -> None:
    before, after = (graph(f"{SIGNATURE} {{ p = {call} y = Conv {own} (p, k) }}", **GIVEN) for _ in range(2))
    assert apply(FoldPadsPass(), after) == []
    assert_same(after, graph(f"{SIGNATURE} {{ y = Conv <pads = {pads}> (x, k) }}", **GIVEN))
    x = np.random.default_rng(1).standard_normal((1, 2, 4, 5)).astype(np.float32)
    np.testing.assert_allclose(
        evaluate(after, {"x": x})[0], evaluate(before, {"x": x})[0], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("body", "reasons"),
    [
        ('p = Pad <mode = "reflect"> (x, zeros) y = Conv(p, k)', ["its mode is not constant"]),
        ("p = Pad(x, zeros, one) y = Conv(p, k)", ["its value is not zero"]),
        ("p = Pad(x, zeros, , axes) y = Conv(p, k)", ["it has the input axes"]),
        ("p = Pad(x, less) y = Conv(p, k)", ["it crops, or pads the batch or the channels"]),
        ("p = Pad(x, deep) y = Conv(p, k)", ["it crops, or pads the batch or the channels"]),
        (
            'p = Pad(x, zeros) y = Conv <auto_pad = "SAME_UPPER"> (p, k)',
            ["the convolution behind it has auto_pad"],
        ),
        ("p = Pad(x, zeros) c = Conv(p, k) m = ReduceMax(p) y = Add(c, m)", []),
        ("p = Pad(x, zeros) y = MaxPool <kernel_shape = [3, 3]> (p)", []),
    ],
)
def test_other_pads_stay(body: str, reasons: list[str]) -> None:
    model, before = (graph(f"{SIGNATURE} {{ {body} }}", **GIVEN) for _ in range(2))
    assert apply(FoldPadsPass(), model) == reasons
    assert_same(model, before)
