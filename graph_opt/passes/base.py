"""The base class of carryall's passes, which counts rewrites and records refusals."""

from __future__ import annotations

import abc
from typing import ClassVar

import onnx_ir as ir

from ...records import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """A near miss: the node that a pass did not rewrite, and the reason."""

    node: str
    reason: str


class GraphPass(ir.passes.InPlacePass):
    """A pass over the main graph of a model, with a count of rewrites and a list of refusals.

    Attributes:
        name: its name in lists, reports and ``--disable``: the class name without ``Pass``.
        oldest_opset: models of an older opset are not changed, because the pass reads and writes newer forms.
        fired: number of rewrites of the latest call.
        refusals: near misses of the latest call.
    """

    oldest_opset: ClassVar[int] = 18

    def __init__(self) -> None:
        super().__init__()
        self.name = type(self).__name__.removesuffix("Pass")
        self.fired = 0
        self.refusals: list[Refusal] = []

    def __call__(self, model_or_result: ir.Model | ir.passes.PassResult, /) -> ir.passes.PassResult:
        """Run the pass, unless the model's opset is older than ``oldest_opset``."""
        source = model_or_result
        model = source if isinstance(source, ir.Model) else source.model
        if model.opset_imports.get("", self.oldest_opset) < self.oldest_opset:
            self.fired, self.refusals = 0, []
            return ir.passes.PassResult(model, modified=False)
        return super().__call__(source)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the main graph of ``model``."""
        self.fired, self.refusals = 0, []
        self.rewrite(model.graph)
        return ir.passes.PassResult(model, modified=self.fired > 0)

    @abc.abstractmethod
    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite ``graph`` in place; add 1 to ``fired`` for each rewrite."""

    def refuse(self, node: ir.Node, reason: str) -> None:
        """Record that ``node`` was not rewritten."""
        self.refusals.append(Refusal(node.name or node.op_type, reason))


class EveryGraphPass(GraphPass):
    """A pass over every graph separately: the main graph, subgraphs and functions."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite every graph of ``model``."""
        self.fired, self.refusals = 0, []
        for graph in [*model.graphs(), *(function.graph for function in model.functions.values())]:
            self.rewrite(graph)
        return ir.passes.PassResult(model, modified=self.fired > 0)


def pass_name(pass_: ir.passes.PassBase) -> str:
    """Return the name of a ``GraphPass``, or the class name of any other onnx_ir pass without ``Pass``."""
    return pass_.name if isinstance(pass_, GraphPass) else type(pass_).__name__.removesuffix("Pass")
