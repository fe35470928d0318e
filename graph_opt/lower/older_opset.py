"""Rewrite newer standard operators in older ones, for targets without kernels for the newer.

    RMSNormalization(x, scale)              -> x / sqrt(mean(x^2) + epsilon) * scale, in fp32
    RotaryEmbedding(x, cos, sin, positions) -> com.microsoft RotaryEmbedding(x, positions, cos, sin)

    Gelu(x, approximate="tanh" or "none")   -> com.microsoft FastGelu(x) or Gelu(x)

Then declare the older opset; all other operators are the same in both.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...errors import GraphError
from ..graph.edit import MICROSOFT, float_attribute, insert, int_attribute, nodes_of, replace, shared_constant
from ..graph.opset_forms import missing_form
from ..passes.base import GraphPass


class DecomposeNormsPass(GraphPass):
    """Rewrite RMSNormalization (Zhang and Sennrich, arXiv:1910.07467) in basic operators."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite norms of the last axis."""
        for node in nodes_of(graph, "RMSNormalization"):
            x, scale = node.inputs[0], node.inputs[1]
            if x is None or scale is None or int_attribute(node, "axis", -1) != -1:
                self.refuse(node, "it normalises other axes than the last")
                continue
            dtype = x.dtype or ir.DataType.FLOAT
            wide = _cast(node, x, ir.DataType.FLOAT)
            square = insert(node, "Pow", [wide, _scalar(graph, 2.0)]).outputs[0]
            last = shared_constant(graph, "norms.last_axis", np.array([-1], np.int64))
            mean = insert(node, "ReduceMean", [square, last], {"keepdims": 1}).outputs[0]
            epsilon = _scalar(graph, float_attribute(node, "epsilon", 1e-5))
            root = insert(node, "Sqrt", [insert(node, "Add", [mean, epsilon]).outputs[0]]).outputs[0]
            normal = _cast(node, insert(node, "Div", [wide, root]).outputs[0], dtype)
            replace(node.outputs[0], insert(node, "Mul", [normal, scale]).outputs[0])
            graph.remove(node, safe=True)
            self.fired += 1


class MicrosoftRotaryPass(GraphPass):
    """Replace RotaryEmbedding with cos and sin tables by that of com.microsoft."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite nodes on [batch, sequence, heads * head_dim]."""
        for node in nodes_of(graph, "RotaryEmbedding"):
            if len(node.inputs) < 4 or node.inputs[3] is None or not int_attribute(node, "num_heads", 0):
                self.refuse(node, "its angles are not a table, or its input is 4-D")
                continue
            x, cos, sin, positions = node.inputs
            attributes = {"interleaved": int_attribute(node, "interleaved", 0)}
            if part := int_attribute(node, "rotary_embedding_dim", 0):
                attributes |= {
                    "rotary_embedding_dim": part,
                    "num_heads": int_attribute(node, "num_heads", 0),
                }
            operands = [x, positions, cos, sin]
            rotated = insert(node, "RotaryEmbedding", operands, attributes, domain=MICROSOFT)
            rotated.name = node.name
            replace(node.outputs[0], rotated.outputs[0])
            graph.remove(node, safe=True)
            self.fired += 1


class MicrosoftGeluPass(GraphPass):
    """Replace Gelu (Hendrycks and Gimpel, arXiv:1606.08415) by FastGelu or Gelu of com.microsoft."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite Gelu with and without the approximation by tanh."""
        for node in nodes_of(graph, "Gelu"):
            if node.domain:
                continue
            form = node.attributes.get("approximate")
            operator = "FastGelu" if form is not None and form.as_string() == "tanh" else "Gelu"
            made = insert(node, operator, [node.inputs[0]], domain=MICROSOFT)
            made.name = node.name
            replace(node.outputs[0], made.outputs[0])
            graph.remove(node, safe=True)
            self.fired += 1


class OlderOpsetPass(GraphPass):
    """Declare an older standard opset.

    Args:
        version: the opset.

    Raises:
        GraphError: the opset does not have an operator, or one of its attributes, inputs or types.
    """

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version

    def rewrite(self, graph: ir.Graph) -> None:
        """Check every node, then set the opset."""
        if graph.opset_imports.get("", self.version) <= self.version:
            return
        for node in graph.all_nodes():
            reason = missing_form(node, self.version)
            if reason is not None:
                raise GraphError(
                    f"{node.op_type} {node.name} needs opset {graph.opset_imports['']}, but the target "
                    f"supports opsets up to {self.version}: opset {self.version} {reason}"
                )
            node.version = None
        graph.opset_imports[""] = self.version
        self.fired += 1


def _cast(node: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    if value.dtype == dtype:
        return value
    cast = insert(node, "Cast", [value], {"to": dtype.value}).outputs[0]
    cast.type, cast.shape = ir.TensorType(dtype), value.shape
    return cast


def _scalar(graph: ir.Graph, number: float) -> ir.Value:
    return shared_constant(graph, f"norms.constant_{number:g}", np.array(number, np.float32))
