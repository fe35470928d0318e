"""A decoder of a fixed number of tokens cannot generate: said before any lowering begins."""

from __future__ import annotations

import onnx_ir as ir

from ...errors import GraphError
from ..analysis.decoder_inputs import fixed_tokens
from ..passes.base import GraphPass


class AnyTokensPass(GraphPass):
    """Insist on a decoder that takes any number of tokens."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Look at the graph; nothing is changed.

        Raises:
            GraphError: the graph takes a fixed number of tokens.
        """
        reason = fixed_tokens(graph)
        if reason is not None:
            raise GraphError(reason)
