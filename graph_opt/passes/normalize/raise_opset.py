"""Convert models of opset 7 to 22 to opset 23, which has every canonical operator.

A model without an equivalent in opset 23 keeps its opset. Other passes then do not change it, because they
write newer forms (``GraphPass.oldest_opset``).
"""

from __future__ import annotations

import logging
from typing import ClassVar

import onnx
import onnx_ir as ir

from ..base import GraphPass
from ..shape_inference import ShapeInferencePass
from .older_forms import RANK_DEPENDENT_BELOW, raise_form, unsupported_form

_log = logging.getLogger(__name__)

TARGET = 23
OLDEST = 7
_CONSTANT_INITIALIZERS = 4  # since this IR version, initializers need not be graph inputs
_IR_VERSION = 10  # the newest IR version before that of opset 23


class RaiseOpsetPass(GraphPass):
    """Raise the opset to 23. Newer models are handled by ``lower_opset.py``.

    Attributes:
        source: the original opset of the latest model; None if the model does not import the standard domain.
    """

    oldest_opset: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.source: int | None = None

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Convert the whole model, or change nothing."""
        self.fired, self.refusals = 0, []
        imports = model.opset_imports
        if "ai.onnx" in imports:
            imports[""] = imports.pop("ai.onnx")
        self.source = imports.get("")
        if self.source is None:
            imports[""] = TARGET  # for nodes that later passes insert
        elif self.source < TARGET:
            self._check(model, self.source)
            if not self.refusals:
                self._raise(model, self.source)
        return ir.passes.PassResult(model, modified=self.fired > 0)

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite every node of a graph and its subgraphs in the form of opset 23."""
        version = graph.opset_imports[""]
        for node in list(graph.all_nodes()):
            if not node.domain:
                raise_form(graph, node, version)
                node.version = None
        self.fired += 1

    def _check(self, model: ir.Model, version: int) -> None:
        first = next(iter(model.graph), None)
        if version < OLDEST and first is not None:
            self.refuse(first, f"the model keeps opset {version}: conversion needs opset {OLDEST} or newer")
        for node in model.graph.all_nodes():
            reason = None if node.domain else unsupported_form(node, version)
            if reason is not None:
                self.refuse(node, f"the model keeps opset {version}: {reason}")

    def _raise(self, model: ir.Model, version: int) -> None:
        if model.ir_version < _CONSTANT_INITIALIZERS:
            _remove_initializer_inputs(model.graph)
        if version < RANK_DEPENDENT_BELOW:
            _infer_shapes(model)
        self.rewrite(model.graph)
        model.opset_imports[""] = TARGET
        model.ir_version = max(model.ir_version, _IR_VERSION)


def _infer_shapes(model: ir.Model) -> None:
    """Infer shapes, for ranks. On failure nothing is lost but compactness: unknown ranks need more nodes."""
    try:
        ShapeInferencePass()(model)
    except (onnx.shape_inference.InferenceError, RuntimeError) as error:
        _log.debug("shape inference failed: %s", error)


def _remove_initializer_inputs(graph: ir.Graph) -> None:
    """Remove initializers from the inputs: before IR version 4 every initializer had to be an input too."""
    kept = [value for value in graph.inputs if not value.is_initializer()]
    graph.inputs.clear()
    graph.inputs.extend(kept)
