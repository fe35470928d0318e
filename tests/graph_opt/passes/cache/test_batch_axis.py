"""The batch size is read from ``input_ids`` alone."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from carryall.graph_opt.graph.edit import nodes_of
from carryall.graph_opt.passes.cache.batch_axis import BatchAxisPass
from carryall.graph_opt.passes.remove_unused import RemoveUnusedNodesPass

TEXT = """<ir_version: 11, opset_import: ["": 23]>
g (int64[batch, sequence] input_ids, int64[batch, total] attention_mask,
   float[AXIS, 2, past, 8] kv) => (int64[N] y)
<int64 first = {0}, int64[1] third = {2}> {
    READ
}"""


CACHE = "past_key_values.0.value"


def changed(read: str, axis: str = "batch") -> ir.Graph:
    model = ir.from_onnx_text(TEXT.replace("READ", read).replace("AXIS", axis))
    model.graph.inputs[2].name = CACHE
    BatchAxisPass()(model)
    RemoveUnusedNodesPass()(model)
    return model.graph


def sources(read: str, axis: str = "batch") -> list[str]:
    """Return the names of the inputs whose shape the graph reads."""
    nodes = nodes_of(changed(read, axis), "Shape")
    return sorted(str(node.inputs[0].name) for node in nodes if node.inputs[0] is not None)


@pytest.mark.parametrize("value", ["kv", "attention_mask"])
def test_the_first_axis_is_read_from_the_tokens(value: str) -> None:
    assert sources(f"y = Shape <start = 0, end = 1> ({value})") == ["input_ids"]
    assert sources(f"s = Shape ({value})  y = Gather (s, first)") == ["input_ids"]


def test_other_axes_and_caches_of_another_batch_stay() -> None:
    assert sources("y = Shape <start = 2, end = 3> (kv)") == [CACHE]
    assert sources("s = Shape (kv)  y = Gather (s, third)") == [CACHE]
    assert sources("y = Shape <start = 0, end = 1> (kv)", axis="slots") == [CACHE]


def test_a_shape_with_other_readers_stays_for_them() -> None:
    read = "s = Shape (kv)  a = Gather (s, first)  b = Gather (s, third)  y = Add (a, b)"
    assert sources(read) == ["input_ids", CACHE]
