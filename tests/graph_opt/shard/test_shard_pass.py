"""The graph of a rank: what is cut, joined and refused."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import graph

from carryall.errors import GraphError
from carryall.graph_opt.shard.shard_pass import ShardPass

RNG = np.random.default_rng(0)
MLP = """g (float[1, T, 8] x) => (float[1, T, 10] logits) {
    h = MatMul (x, w0)
    a = Relu (h)
    d = MatMul (a, w1)
    s = Add (x, d)
    logits = MatMul (s, w2)
}"""


def weights(*, quantized: bool) -> dict[str, np.ndarray]:
    floats = {f"w{i}": RNG.random(size, np.float32) for i, size in enumerate([(8, 12), (12, 8), (8, 10)])}
    return floats if not quantized else {f"{name}_q": RNG.integers(0, 255, w.shape, np.uint8)
                                         for name, w in floats.items()}  # fmt: skip


def collectives(text: str, *, quantized: bool) -> list[tuple[str, str, int]]:
    """Return the operators over ranks: their kind, what they read, and the width of that on rank 0."""
    arrays = weights(quantized=quantized)
    if quantized:
        lines = "".join(f"w{i} = DequantizeLinear <axis = 0> (w{i}_q, scale)\n" for i in range(3))
        text = text.replace("{\n", "{\n" + lines, 1)
        arrays["scale"] = np.array(0.5, np.float32)
    model = graph(text, **arrays)
    ShardPass(0, 2)(model)
    return [
        (node.op_type, str(value.name), int(str((value.shape or [0])[-1])))
        for node in model.graph
        if node.domain == "carryall" and (value := node.inputs[0]) is not None
    ]


def test_a_product_with_float_weights_is_added_up_behind_it() -> None:
    assert collectives(MLP, quantized=False) == [("AllReduce", "d", 8)]


def test_a_product_with_quantized_weights_reads_joined_rows_and_has_some_columns() -> None:
    assert collectives(MLP, quantized=True) == [("AllGather", "a", 6), ("AllGather", "d", 4)]


def test_a_graph_of_which_only_the_logits_could_be_cut_is_refused() -> None:
    text = "g (float[1, T, 8] x) => (float[1, T, 10] logits) { logits = MatMul (x, w2) }"
    model: ir.Model = graph(text, **weights(quantized=False))
    with pytest.raises(GraphError, match="no linear layer of the graph can be cut"):
        ShardPass(0, 2)(model)
