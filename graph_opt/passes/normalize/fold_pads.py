"""Fold a Pad with zeros into the attribute ``pads`` of the convolution behind it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...graph.edit import constant, nodes_of, remove_unused, sole_consumer, text_attribute
from ..base import EveryGraphPass

_LEADING_AXES = 2  # batch and channels


class FoldPadsPass(EveryGraphPass):
    """Fold each Pad whose only consumer is a convolution."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Try every Pad."""
        for node in nodes_of(graph, "Pad"):
            reader = sole_consumer(node.outputs[0])
            if reader is None or reader.op_type != "Conv" or reader.domain or reader.graph is not graph:
                continue
            pads = _spatial_pads(node)
            if isinstance(pads, str):
                self.refuse(node, pads)
                continue
            if text_attribute(reader, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
                self.refuse(node, "the convolution behind it has auto_pad")
                continue
            own = reader.attributes.get("pads")
            total = np.array(pads) + (0 if own is None else np.array(own.as_ints()))
            reader.attributes.pop("auto_pad", None)
            reader.attributes["pads"] = ir.AttrInt64s("pads", total.tolist())
            reader.replace_input_with(0, node.inputs[0])
            remove_unused(graph, node)
            self.fired += 1


def _spatial_pads(node: ir.Node) -> list[int] | str:
    """Return the zeros that a Pad adds to the spatial axes, begins then ends, or why it does not."""
    if text_attribute(node, "mode", "constant") != "constant":
        return "its mode is not constant"
    if any(value is not None for value in node.inputs[3:]):
        return "it has the input axes"
    fill = constant(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else np.zeros(1)
    pads = constant(node.inputs[1])
    if fill is None or pads is None:
        return "its pads or its value are not constant"
    if fill.any():
        return "its value is not zero"
    begins, ends = pads.reshape(2, -1)
    if (pads < 0).any() or begins[:_LEADING_AXES].any() or ends[:_LEADING_AXES].any():
        return "it crops, or pads the batch or the channels"
    return [*begins[_LEADING_AXES:].tolist(), *ends[_LEADING_AXES:].tolist()]
