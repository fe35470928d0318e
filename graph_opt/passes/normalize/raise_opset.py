"""Models of opset 7 to 22 -> opset 23, which has every canonical operator.

A model that has no equal there keeps its opset. Passes leave such a model alone, since what they write is
written in newer forms (``GraphPass.oldest_opset``).
"""

from __future__ import annotations

import logging
from typing import ClassVar

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from ..base import GraphPass
from .older_forms import RANK_DEPENDENT_BELOW, hindrance, raise_form

_log = logging.getLogger(__name__)

TARGET = 23
OLDEST = 7
_CONSTANT_INITIALIZERS = 4  # the IR version from which on initializers need be no inputs
_IR_VERSION = 10  # the newest IR version before that of opset 23


class RaiseOpsetPass(GraphPass):
    """Raise the opset to 23; newer models come later (``lower_opset.py``).

    Attributes:
        source: the opset that the latest model came with; None if it has no operator of the standard.
    """

    oldest_opset: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.source: int | None = None

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Convert the whole model, or nothing of it."""
        self.fired, self.refusals = 0, []
        imports = model.opset_imports
        if "ai.onnx" in imports:
            imports[""] = imports.pop("ai.onnx")
        self.source = imports.get("")
        if self.source is None:
            imports[""] = TARGET  # for what passes may write
        elif self.source < TARGET:
            self._check(model, self.source)
            if not self.refusals:
                self._raise(model, self.source)
        return ir.passes.PassResult(model, modified=self.fired > 0)

    def rewrite(self, graph: ir.Graph) -> None:
        """Write every node of a graph, and of those inside it, in the forms of opset 23."""
        version = graph.opset_imports[""]
        for node in list(graph.all_nodes()):
            if not node.domain:
                raise_form(graph, node, version)
                node.version = None
        self.fired += 1

    def _check(self, model: ir.Model, version: int) -> None:
        first = next(iter(model.graph), None)
        if version < OLDEST and first is not None:
            self.refuse(first, f"the model keeps opset {version}: it can be raised from {OLDEST} on")
        for node in model.graph.all_nodes():
            reason = None if node.domain else hindrance(node, version)
            if reason is not None:
                self.refuse(node, f"the model keeps opset {version}: {reason}")

    def _raise(self, model: ir.Model, version: int) -> None:
        if model.ir_version < _CONSTANT_INITIALIZERS:
            _drop_stated_initializers(model.graph)
        if version < RANK_DEPENDENT_BELOW:
            _learn_ranks(model)
        self.rewrite(model.graph)
        model.opset_imports[""] = TARGET
        model.ir_version = max(model.ir_version, _IR_VERSION)


def _learn_ranks(model: ir.Model) -> None:
    """Infer shapes where the model's own are consistent; a form of unknown rank only costs more nodes."""
    try:
        common.ShapeInferencePass()(model)
    except (onnx.shape_inference.InferenceError, RuntimeError) as error:
        _log.debug("shapes are not inferred: %s", error)


def _drop_stated_initializers(graph: ir.Graph) -> None:
    """Before IR version 4 every initializer was an input as well, and no caller was meant to set it."""
    kept = [value for value in graph.inputs if not value.is_initializer()]
    graph.inputs.clear()
    graph.inputs.extend(kept)
