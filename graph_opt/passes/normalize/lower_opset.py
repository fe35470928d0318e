"""Declare an older opset where all operators of a model exist in it with the same meaning."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...graph.edit import float_attribute, insert, nodes_of, replace, shared_constant
from ...graph.opset_forms import missing_form
from ..base import EveryGraphPass, GraphPass
from .raise_opset import TARGET, RaiseOpsetPass

_LOWEST = 18  # older opsets have other forms of common operators


class WriteSwishPass(EveryGraphPass):
    """Rewrite Swish(x) of opset 24 as x * Sigmoid(alpha * x), its canonical form."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite every Swish."""
        for node in nodes_of(graph, "Swish"):
            x, alpha = node.inputs[0], float_attribute(node, "alpha", 1.0)
            scaled = x
            if alpha != 1:
                if x is None or x.dtype is None:
                    self.refuse(node, "the type of its input is unknown")
                    continue
                factor = np.array(alpha, x.dtype.numpy())
                name = f"swish.{x.dtype.name.lower()}_{alpha!r}".replace("-", "m").replace(".", "p")
                scaled = insert(node, "Mul", [x, shared_constant(graph, name, factor)]).outputs[0]
            gate = insert(node, "Sigmoid", [scaled]).outputs[0]
            replace(node.outputs[0], insert(node, "Mul", [x, gate]).outputs[0])
            graph.remove(node, safe=True)
            self.fired += 1


class LowerOpsetPass(GraphPass):
    """Declare opset 23 for a model of a newer opset if all its operators exist in 23; else change nothing."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Check every node, then set the opset."""
        version = graph.opset_imports.get("", TARGET)
        if version <= TARGET:
            return
        nodes = list(graph.all_nodes())
        for node in nodes:
            reason = missing_form(node, TARGET)
            if reason is not None:
                self.refuse(node, f"it needs opset {version}: opset {TARGET} {reason}")
        if self.refusals:
            return
        for node in nodes:
            node.version = None
        graph.opset_imports[""] = TARGET
        self.fired += 1


class LowestOpsetPass(GraphPass):
    """Declare the oldest opset that has every operator, because more runtimes support older opsets.

    Args:
        raised: the pass that raised the model's opset before. The declared opset is at least 18 and at
            least the original opset, where an original opset above 23 counts as 23.
    """

    def __init__(self, raised: RaiseOpsetPass) -> None:
        super().__init__()
        self._raised = raised

    def rewrite(self, graph: ir.Graph) -> None:
        """Try opsets in ascending order."""
        version = graph.opset_imports.get("", _LOWEST)
        oldest = min(max(_LOWEST, self._raised.source or _LOWEST), TARGET)
        nodes = [node for node in graph.all_nodes() if not node.domain]
        if self._raised.source is None and not nodes:
            graph.opset_imports.pop("", None)
            return
        for older in range(oldest, version):
            if all(missing_form(node, older) is None for node in nodes):
                for node in nodes:
                    node.version = None
                graph.opset_imports[""] = older
                self.fired += 1
                return
