"""Remove decoder inputs that are only passed through to outputs, such as cache settings traced as state."""

from __future__ import annotations

import onnx_ir as ir

from ...analysis.decoder_inputs import is_decoder
from ...graph.edit import remove_unused
from ..base import GraphPass


class RemovePassthroughInputsPass(GraphPass):
    """Remove inputs that are read by Identity nodes to graph outputs only, and those outputs."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Remove each such input with its outputs."""
        if not is_decoder(graph):
            return
        for value in list(graph.inputs):
            copies = _copies(value)
            ends = [copy for copy in copies if copy.is_graph_output()]
            read = any(use.node.op_type != "Identity" or use.node.domain for x in copies for use in x.uses())
            if not ends or read:
                continue
            kept = [output for output in graph.outputs if output not in ends]
            graph.outputs.clear()
            graph.outputs.extend(kept)
            for copy in reversed(copies):
                remove_unused(graph, copy.producer())
            graph.inputs.remove(value)
            self.fired += 1


def _copies(value: ir.Value) -> list[ir.Value]:
    """Return a value and its copies by Identity, in order."""
    found = [value]
    for copy in found:
        found += [use.node.outputs[0] for use in copy.uses() if use.node.op_type == "Identity"]
    return found
