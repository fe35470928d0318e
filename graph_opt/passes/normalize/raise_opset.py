"""Models of opset 13 to 22 -> opset 23, which has every canonical operator.

From 18 on, onnxscript's converter does it. Below, the operators that changed form up to 18 are the
reductions, whose axes became an operand, and Split, which must say into how many parts.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....errors import GraphError
from ...graph.edit import shared_constant
from ..base import GraphPass

TARGET = 23
_OLDEST = 13
_CONVERTIBLE = 18
_REDUCTIONS = frozenset(
    f"Reduce{kind}" for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
)
_CHANGED = frozenset({"Resize"})
_ROI_ALIGN = 16  # the opset that changed what RoiAlign does where it does not say so


class RaiseOpsetPass(GraphPass):
    """Raise the opset to 23; newer models come later (``lower_opset.py``).

    Raises:
        GraphError: the model is older than opset 13, or holds an operator that would change its meaning.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Convert the whole model."""
        self.fired, self.refusals = 0, []
        version = model.opset_imports.get("")
        if version is None or version >= TARGET:
            return ir.passes.PassResult(model, modified=False)
        if version < _OLDEST:
            raise GraphError(
                f"the model is of opset {version}; export it again with opset {_OLDEST} or later"
            )
        if version < _CONVERTIBLE:
            self.rewrite(model.graph)
            model.opset_imports[""] = _CONVERTIBLE
        from onnxscript.version_converter import ConvertVersionPass  # slow to import, and rarely needed

        ConvertVersionPass(TARGET)(model)
        self.fired += 1
        return ir.passes.PassResult(model, modified=True)

    def rewrite(self, graph: ir.Graph) -> None:
        """Raise a graph older than opset 18 to 18."""
        version = graph.opset_imports[""]
        for node in graph.all_nodes():
            if node.domain:
                continue
            if node.op_type in _CHANGED:
                raise GraphError(
                    f"{node.op_type} {node.name} cannot be raised from an opset below {_CONVERTIBLE}; "
                    f"export the model again with opset {_CONVERTIBLE} or later"
                )
            if node.op_type == "RoiAlign" and version < _ROI_ALIGN:
                mode = ir.AttrString("coordinate_transformation_mode", "output_half_pixel")
                node.attributes["coordinate_transformation_mode"] = mode
            if node.op_type in _REDUCTIONS and "axes" in node.attributes:
                axes = list(node.attributes.pop("axes").as_ints())
                name = "axes." + "_".join(map(str, axes)).replace("-", "m")
                node.resize_inputs(2)
                node.replace_input_with(1, shared_constant(graph, name, np.array(axes, np.int64)))
            elif node.op_type == "Split" and (len(node.inputs) < 2 or node.inputs[1] is None):
                node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))
