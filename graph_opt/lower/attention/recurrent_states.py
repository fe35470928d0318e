"""Layers with recurrent states, which memories of slots and blocks do not hold yet."""

from __future__ import annotations

import onnx_ir as ir

from ....contract import is_past_state
from ....errors import UnsupportedAttentionError
from ...graph.recurrent_states import use_microsoft_states
from ...passes.base import GraphPass


class RefuseStatesPass(GraphPass):
    """Refuse a graph with recurrent states, which is then lowered with explicit ones where that is possible.

    Raises:
        UnsupportedAttentionError: the graph has such states.
    """

    def rewrite(self, graph: ir.Graph) -> None:
        """Check the inputs."""
        states = [value.name for value in graph.inputs if is_past_state(value.name)]
        if states:
            raise UnsupportedAttentionError(
                f"the graph has recurrent states ({states[0]} and others), which slots and blocks do not hold"
            )


class MicrosoftStatesPass(GraphPass):
    """Replace the standard's operators with states, of opset 27, by equal ones of com.microsoft.

    So the graph needs no newer opset than its other operators do.
    """

    def rewrite(self, graph: ir.Graph) -> None:
        """Change the domain of each such node."""
        self.fired += use_microsoft_states(graph)
