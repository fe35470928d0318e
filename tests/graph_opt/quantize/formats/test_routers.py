"""Routers stay as they are: rounding one would send tokens to other experts."""

from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import apply, graph

from carryall.graph_opt.passes.base import GraphPass
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.formats.dynamic_int8 import DynamicQuantizationPass
from carryall.graph_opt.quantize.formats.weight_only import WeightOnlyQuantizationPass

FORM = BlockFormat(bits=4, block_size=16)
RNG = np.random.default_rng(0)
WEIGHTS = {name: RNG.standard_normal((32, 32)).astype(np.float32) for name in ("router", "expert")}
TEXT = """g (float[n, 32] x) => (float[n, 32] y, int64[n, 2] chosen, float[n, 2] shares) {
    scores = MatMul(x, router)
    likely = Softmax(scores)
    shares, chosen = TopK(likely, two)
    y = MatMul(x, expert)
}"""


@pytest.mark.parametrize("pass_", [WeightOnlyQuantizationPass(FORM), DynamicQuantizationPass(FORM)])
def test_only_the_expert_is_quantized(pass_: GraphPass) -> None:
    model = graph(TEXT, two=np.array([2]), **WEIGHTS)
    assert apply(pass_, model) == ["weight router is a router's, which is not quantized"]
    assert "router" in model.graph.initializers
    assert "expert" not in model.graph.initializers
