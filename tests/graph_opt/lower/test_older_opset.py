"""Operators for targets without the newest standard operators."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

from carryall.graph_opt.lower.older_opset import MicrosoftGeluPass

ort = pytest.importorskip("onnxruntime")
GRAPH = """<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
g (float[1, 9] x) => (float[1, 9] y) { y = Gelu%s(x) }"""


@pytest.mark.parametrize(
    ("attribute", "operator"),
    [("", "Gelu"), ('<approximate = "none">', "Gelu"), ('<approximate = "tanh">', "FastGelu")],
)
def test_gelu_of_com_microsoft(attribute: str, operator: str) -> None:
    model = ir.from_onnx_text(GRAPH % attribute)
    MicrosoftGeluPass()(model)
    (node,) = model.graph
    assert (node.domain, node.op_type) == ("com.microsoft", operator)
    x = np.linspace(-4, 4, 9, dtype=np.float32)[None]
    if operator == "Gelu":
        share = [0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x[0]]
    else:
        share = [
            0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3))) for value in x[0]
        ]
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x})[0][0], x[0] * share, atol=1e-6)
