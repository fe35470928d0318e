"""SmoothQuant: large activation channels divided out of a norm's gain, multiplied into the weights behind it.

    MatMul(Norm(h) * gain, W)  ->  MatMul(Norm(h) * (gain / s), s * W)

The product stays the same, while one scale then holds all channels of the activation. G. Xiao et al.,
"SmoothQuant", https://arxiv.org/abs/2211.10438.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ...runtime.errors import GraphError
from ..edit import nodes_of, weight
from ..lazy import Array, lazy, shape_of
from ..passes.base import GraphPass
from .activations import ActivationReader, Report, Tokens, read_windows
from .blockwise import Floats

_STRENGTH = 0.5  # of the difficulty, how much moves from activations to weights; as in the paper
_NORMS = ("RMSNormalization", "LayerNormalization")


def largest_activations(
    model: Path, windows: Sequence[Tokens], *, context_length: int, progress: Report | None = None
) -> dict[str, Floats]:
    """Measure the largest magnitude of every channel that leaves a norm, by the value's name.

    Raises:
        GraphError: an activation is NaN or infinite.
        UsageError: the text is too short.
    """
    graph = ir.load(model).graph
    names = [
        str(node.outputs[0].name) for op_type in _NORMS for node in nodes_of(graph, op_type) if _layers(node)
    ]
    largest: dict[str, Floats] = {}
    for values in read_windows(ActivationReader(model, names), windows, context_length, progress):
        for name, value in values.items():
            magnitude = np.abs(value).reshape(-1, value.shape[-1]).max(axis=0)
            largest[name] = np.maximum(magnitude, largest.get(name, magnitude))
    return largest


def smoothing_factors(model: Path, largest: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return what to divide the channels of every norm's output by, one layer's weights in memory at a time.

    Args:
        model: a portable float graph.
        largest: as ``largest_activations`` returns them.
    """
    graph = ir.load(model).graph
    norms = [node for op_type in _NORMS for node in nodes_of(graph, op_type)]
    names = {str(node.outputs[0].name): node for node in norms}
    return {name: _factors(largest[name], _layers(node)) for name, node in names.items() if name in largest}


class SmoothQuantPass(GraphPass):
    """Even out the channels between norms and the products behind them.

    Args:
        factors: as ``smoothing_factors`` returns them.
    """

    def __init__(self, factors: Mapping[str, Floats]) -> None:
        super().__init__()
        self.factors = factors

    def rewrite(self, graph: ir.Graph) -> None:
        """Rescale every norm that only products with weights of their own read."""
        for op_type in _NORMS:
            for node in nodes_of(graph, op_type):
                factors = self.factors.get(str(node.outputs[0].name))
                layers = _layers(node)
                if factors is None or not layers:
                    continue
                for value in node.inputs[1:]:  # the gain, and a LayerNormalization's bias
                    if value is not None:
                        _scale(value, 1 / factors)
                for layer in layers:
                    _scale(layer, factors[:, None])
                self.fired += 1


def _layers(norm: ir.Node) -> list[ir.Value]:
    """Return the weights that multiply a norm's output, empty if anything else reads it or them."""
    output = norm.outputs[0]
    uses = list(output.uses())
    layers = [use.node.inputs[1] for use in uses if use.node.op_type == "MatMul" and use.idx == 0]
    changed = [*layers, *norm.inputs[1:]]
    own = all(value is not None and weight(value) is not None and len(value.uses()) == 1 for value in changed)
    if output.is_graph_output() or len(layers) < len(uses) or not own:
        return []
    return [layer for layer in layers if layer is not None]


def _factors(magnitude: Floats, layers: Sequence[ir.Value]) -> Floats:
    rows = np.max([np.abs(_content(layer).numpy()).max(axis=1) for layer in layers], axis=0).astype(
        np.float32
    )
    factors = np.maximum(magnitude, 1e-5) ** _STRENGTH / np.maximum(rows, 1e-5) ** (1 - _STRENGTH)
    result: Floats = np.maximum(factors, 1e-5).astype(np.float32)
    return result


def _scale(value: ir.Value, factors: Array) -> None:
    """Multiply a weight, lazily."""
    tensor = _content(value)

    def compute() -> Array:
        return (tensor.numpy().astype(np.float32) * factors).astype(np.float32)

    scaled = lazy(compute, ir.DataType.FLOAT, shape_of(tensor))
    scaled.name = value.name
    value.const_value = scaled


def _content(value: ir.Value) -> ir.TensorProtocol:
    tensor = weight(value)
    if tensor is None:
        raise GraphError(f"initializer {value.name} has no content")
    return tensor
