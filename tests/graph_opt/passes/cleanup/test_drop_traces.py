"""Notes of torch's exporter are removed from every graph; other metadata is kept."""

from __future__ import annotations

import onnx_ir as ir

from carryall.graph_opt.passes.cleanup.drop_traces import DropTracesPass

BRANCHES = """
<ir_version: 10, opset_import: ["": 20]>
g (bool c, float[2] x) => (float[2] y) {
  y = If(c) <then_branch = a () => (t) { t = Neg(x) }, else_branch = b () => (e) { e = Abs(x) }>
}
"""


def test_notes_of_torch_are_removed_in_every_graph() -> None:
    model = ir.from_onnx_text(BRANCHES)
    nodes = [node for graph in model.graphs() for node in graph]
    for node in nodes:
        node.metadata_props["pkg.torch.onnx.stack_trace"] = "File x.py, line 1"
        node.outputs[0].metadata_props["pkg.torch.onnx.original_node_name"] = "neg"
        node.metadata_props["kept"] = "1"
    assert len(nodes) == 3
    assert DropTracesPass()(model).modified
    assert [node.metadata_props for node in nodes] == [{"kept": "1"}] * 3
    assert all(not node.outputs[0].metadata_props for node in nodes)
    assert not DropTracesPass()(model).modified
