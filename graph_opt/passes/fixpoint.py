"""Passes repeated until they change nothing."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from .base import GraphPass


class Fixpoint(GraphPass):
    """Repeat a list of passes until a round modifies nothing; it is listed as one pass.

    ``fired`` counts all rounds; ``refusals`` are those of the last, as earlier ones may be void by then.

    Args:
        name: what the whole is listed and disabled by.
        passes: they must say truly whether they modified the model.
        max_rounds: a bound against passes that undo each other.
    """

    def __init__(self, name: str, passes: Sequence[ir.passes.PassBase], *, max_rounds: int = 8) -> None:
        super().__init__()
        self.name = name
        self.passes = list(passes)
        self.max_rounds = max_rounds

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the rounds."""
        self.fired, modified = 0, False
        for _ in range(self.max_rounds):
            self.refusals = []
            changed = [self._run(pass_, model) for pass_ in self.passes]
            if not any(changed):
                break
            modified = True
        return ir.passes.PassResult(model, modified=modified)

    def _run(self, pass_: ir.passes.PassBase, model: ir.Model) -> bool:
        modified = pass_(model).modified
        if isinstance(pass_, GraphPass):
            self.fired += pass_.fired
            self.refusals += pass_.refusals
        elif modified:
            self.fired += 1
        return modified

    def rewrite(self, graph: ir.Graph) -> None:
        """Not used: the passes work on the whole model."""
        raise NotImplementedError
