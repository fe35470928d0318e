from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.passes.normalize.norm_before_transpose import NormBeforeTransposePass

W = np.linspace(0.5, 2, 8).astype(np.float32)
SIGNATURE = "g (float[N, S, 2, 8] x) => (float[N, 2, S, 8] y)"


@pytest.mark.parametrize("norm", ["RMSNormalization <axis = -1>", "LayerNormalization <axis = 3>"])
def test_the_norm_comes_first(norm: str) -> None:
    model = graph(f"{SIGNATURE} {{ t = Transpose <perm = [0, 2, 1, 3]> (x) y = {norm} (t, w) }}", w=W)
    assert apply(NormBeforeTransposePass(), model) == []
    after = f"n = {norm} (x, w) y = Transpose <perm = [0, 2, 1, 3]> (n)"
    assert_same(model, graph(f"{SIGNATURE} {{ {after} }}", w=W))


@pytest.mark.parametrize(
    "body",
    [
        "t = Transpose <perm = [0, 1, 3, 2]> (x) y = RMSNormalization <axis = -1> (t, w)",
        "t = Transpose <perm = [0, 2, 1, 3]> (x) y = RMSNormalization <axis = 2> (t, w)",
    ],
    ids=["the last axis moves", "more axes than the last"],
)
def test_a_norm_over_moved_axes_stays(body: str) -> None:
    reason = "the Transpose in front of it moves the normalised axis"
    assert apply(NormBeforeTransposePass(), graph(f"{SIGNATURE} {{ {body} }}", w=W)) == [reason]
