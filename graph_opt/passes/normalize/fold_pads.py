"""Pad with zeros in front of a convolution -> the convolution's own ``pads``."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...graph.edit import constant, nodes_of, remove_unused, sole_consumer, text_attribute
from ..base import EveryGraphPass

_BEFORE_PICTURE = 2  # axes: batch and channels


class FoldPadsPass(EveryGraphPass):
    """Let each convolution pad what is padded for it alone."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Look at every Pad."""
        for node in nodes_of(graph, "Pad"):
            reader = sole_consumer(node.outputs[0])
            if reader is None or reader.op_type != "Conv" or reader.domain or reader.graph is not graph:
                continue
            pads = _picture_pads(node)
            if isinstance(pads, str):
                self.refuse(node, pads)
                continue
            if text_attribute(reader, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
                self.refuse(node, "the convolution behind it pads by itself (auto_pad)")
                continue
            own = reader.attributes.get("pads")
            total = np.array(pads) + (0 if own is None else np.array(own.as_ints()))
            reader.attributes.pop("auto_pad", None)
            reader.attributes["pads"] = ir.AttrInt64s("pads", total.tolist())
            reader.replace_input_with(0, node.inputs[0])
            remove_unused(graph, node)
            self.fired += 1


def _picture_pads(node: ir.Node) -> list[int] | str:
    """Return how many zeros a Pad adds, begins and then ends, to the axes of a picture."""
    if text_attribute(node, "mode", "constant") != "constant":
        return "it repeats what is there"
    if any(value is not None for value in node.inputs[3:]):
        return "it names the axes that it pads"
    fill = constant(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else np.zeros(1)
    pads = constant(node.inputs[1])
    if fill is None or pads is None:
        return "how much it adds, or what, is not constant"
    if fill.any():
        return "it does not add zeros"
    begins, ends = pads.reshape(2, -1)
    if (pads < 0).any() or begins[:_BEFORE_PICTURE].any() or ends[:_BEFORE_PICTURE].any():
        return "it cuts off, or pads the batch or the channels"
    return [*begins[_BEFORE_PICTURE:].tolist(), *ends[_BEFORE_PICTURE:].tolist()]
