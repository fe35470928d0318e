"""Models of an opset newer than 23 -> opset 23, where each of their operators has that form."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...graph.edit import float_attribute, insert, nodes_of, replace, shared_constant
from ...graph.opset_forms import missing_form
from ..base import EveryGraphPass, GraphPass
from .raise_opset import TARGET


class WriteSwishPass(EveryGraphPass):
    """Swish(x) of opset 24 -> x * Sigmoid(alpha * x), its canonical form."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Write every Swish out."""
        for node in nodes_of(graph, "Swish"):
            x, alpha = node.inputs[0], float_attribute(node, "alpha", 1.0)
            scaled = x
            if alpha != 1:
                if x is None or x.dtype is None:
                    self.refuse(node, "the type of its alpha is not known")
                    continue
                factor = np.array(alpha, x.dtype.numpy())
                name = f"swish.{x.dtype.name.lower()}_{alpha!r}".replace("-", "m").replace(".", "p")
                scaled = insert(node, "Mul", [x, shared_constant(graph, name, factor)]).outputs[0]
            gate = insert(node, "Sigmoid", [scaled]).outputs[0]
            replace(node.outputs[0], insert(node, "Mul", [x, gate]).outputs[0])
            graph.remove(node, safe=True)
            self.fired += 1


class LowerOpsetPass(GraphPass):
    """Claim opset 23 for a newer model that needs no newer one; any other stays as it is, which is legal."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Check every node, then lower the number."""
        version = graph.opset_imports.get("", TARGET)
        if version <= TARGET:
            return
        nodes = list(graph.all_nodes())
        for node in nodes:
            reason = missing_form(node, TARGET)
            if reason is not None:
                self.refuse(node, f"it needs opset {version}: in opset {TARGET}, {reason}")
        if self.refusals:
            return
        for node in nodes:
            node.version = None
        graph.opset_imports[""] = TARGET
        self.fired += 1
