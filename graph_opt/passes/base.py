"""The base of our own passes: it counts what it changed, and says what it left alone and why."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir


@dataclass(frozen=True, slots=True)
class Refusal:
    """A place that nearly matched: which node, and the reason it was left as it was."""

    node: str
    reason: str


class GraphPass(ir.passes.InPlacePass):
    """A pass over one graph after another, with a fire count and refusals.

    Attributes:
        name: what it is listed, reported and disabled by: its class name without ``Pass``.
        oldest_opset: models of an older opset are left alone, since the pass writes and reads newer forms.
        fired: rewrites made by the latest call.
        refusals: near misses of the latest call.
    """

    oldest_opset: ClassVar[int] = 18

    def __init__(self) -> None:
        super().__init__()
        self.name = type(self).__name__.removesuffix("Pass")
        self.fired = 0
        self.refusals: list[Refusal] = []

    def __call__(self, model_or_result: ir.Model | ir.passes.PassResult, /) -> ir.passes.PassResult:
        """Run the pass, unless the model is too old for it."""
        given = model_or_result
        model = given if isinstance(given, ir.Model) else given.model
        if model.opset_imports.get("", self.oldest_opset) < self.oldest_opset:
            self.fired, self.refusals = 0, []
            return ir.passes.PassResult(model, modified=False)
        return super().__call__(given)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the main graph of ``model``."""
        self.fired, self.refusals = 0, []
        self.rewrite(model.graph)
        return ir.passes.PassResult(model, modified=self.fired > 0)

    @abc.abstractmethod
    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite ``graph`` in place; add to ``fired`` once a rewrite."""

    def refuse(self, node: ir.Node, reason: str) -> None:
        """Record that ``node`` was left alone."""
        self.refusals.append(Refusal(node.name or node.op_type, reason))


class EveryGraphPass(GraphPass):
    """A pass over every graph by itself: the main one, those inside nodes, and functions."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite every graph of ``model``."""
        self.fired, self.refusals = 0, []
        for graph in [*model.graphs(), *(function.graph for function in model.functions.values())]:
            self.rewrite(graph)
        return ir.passes.PassResult(model, modified=self.fired > 0)


def pass_name(pass_: ir.passes.PassBase) -> str:
    """Return ``GraphPass.name``, or the same made from the class name of any other onnx_ir pass."""
    return pass_.name if isinstance(pass_, GraphPass) else type(pass_).__name__.removesuffix("Pass")
