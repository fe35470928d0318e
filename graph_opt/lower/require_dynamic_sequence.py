"""Refuse decoders with a fixed number of tokens before they are lowered: they cannot generate."""

from __future__ import annotations

import onnx_ir as ir

from ...errors import GraphError
from ..analysis.decoder_inputs import fixed_tokens
from ..passes.base import GraphPass


class RequireDynamicSequencePass(GraphPass):
    """Check that a decoder's sequence axis is dynamic."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Check the graph without changing it.

        Raises:
            GraphError: the graph accepts a fixed number of tokens only.
        """
        reason = fixed_tokens(graph)
        if reason is not None:
            raise GraphError(reason)
