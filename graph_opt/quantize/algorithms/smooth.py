"""SmoothQuant: divide large activation channels at their source, and multiply the following weights.

    MatMul(Norm(h) * gain, W)         ->  MatMul(Norm(h) * (gain / s), s * W)
    MatMul(act(gate) * (x @ up), W)   ->  MatMul(act(gate) * (x @ (up / s)), s * W)

The product is unchanged, and one scale fits all channels of the activation better. G. Xiao et al.,
"SmoothQuant", https://arxiv.org/abs/2211.10438. The second line extends the method from norms to gated MLPs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ....errors import GraphError
from ....progress import Progress
from ....records import dataclass
from ...graph.edit import sole_consumer, weight
from ...graph.lazy import Array, lazy, shape_of
from ...graph.onnx_files import read_onnx
from ...passes.base import GraphPass
from ..calibration.activations import ActivationReader, Tokens, read_windows
from .blockwise import Floats
from .layer_changes import recorded

_STRENGTH = 0.5  # the paper's migration strength alpha
_NORMS = ("RMSNormalization", "LayerNormalization")


@dataclass(frozen=True, slots=True)
class _Site:
    """A value, the weights whose last axis are its channels, and the weights of all layers that read it."""

    value: ir.Value
    makers: tuple[ir.Value, ...]
    layers: tuple[ir.Value, ...]

    @property
    def name(self) -> str:
        return str(self.value.name)

    @property
    def is_norm(self) -> bool:
        node = self.value.producer()
        return node is not None and node.op_type in _NORMS


def largest_activations(
    model: Path, windows: Sequence[Tokens], *, context_length: int, progress: Progress | None = None
) -> dict[str, Floats]:
    """Return the largest magnitude per channel, [channels], of every value that can be smoothed, by name.

    Raises:
        GraphError: an activation is NaN or infinite.
        UsageError: the text is too short.
    """
    names = [site.name for site in _sites(read_onnx(model).graph)]
    largest: dict[str, Floats] = {}
    for values in read_windows(ActivationReader(model, names), windows, context_length, progress):
        for name, value in values.items():
            if not value.size:  # no token of the window was routed to this expert
                continue
            magnitude = np.abs(value).reshape(-1, value.shape[-1]).max(axis=0)
            largest[name] = np.maximum(magnitude, largest.get(name, magnitude))
    return largest


def smoothing_factors(model: Path, largest: Mapping[str, Floats], *, norms: bool = True) -> dict[str, Floats]:
    """Return the divisors of the channels, [channels], by value; loads one layer's weights at a time.

    Args:
        model: a portable float graph.
        largest: the result of ``largest_activations``.
        norms: whether to include the outputs of norms, besides products inside of gated MLPs.
    """
    sites = [site for site in _sites(read_onnx(model).graph) if site.name in largest]
    sites = [site for site in sites if norms or not site.is_norm]
    return {site.name: _factors(largest[site.name], site.layers) for site in sites}


class SmoothQuantPass(GraphPass):
    """Smooth the channels of activations in front of products.

    Args:
        factors: the result of ``smoothing_factors``.
    """

    def __init__(self, factors: Mapping[str, Floats]) -> None:
        super().__init__()
        self.factors = factors

    def rewrite(self, graph: ir.Graph) -> None:
        """Rescale the weights before and after every smoothed value."""
        with recorded(graph) as changes:
            for site in _sites(graph):
                factors = self.factors.get(site.name)
                if factors is None:
                    continue
                number = changes.vector(factors)
                for maker in site.makers:
                    _scale(maker, 1 / factors)
                    if not site.is_norm:
                        changes.change_outputs(maker, f"/{number}")
                for layer in site.layers:
                    _scale(layer, factors[:, None])
                    changes.change_inputs(layer, f"*{number}")
                self.fired += 1


def _sites(graph: ir.Graph) -> Iterator[_Site]:
    for node in graph:
        if node.op_type in _NORMS:
            makers = [value for value in node.inputs[1:] if value is not None]  # gain and, if any, bias
        elif node.op_type == "Mul":
            makers = next((found for value in node.inputs if (found := _linear(value))), [])
        else:
            continue
        uses = list(node.outputs[0].uses())
        readers = [use.node.inputs[1] for use in uses if use.node.op_type == "MatMul" and use.idx == 0]
        layers = [value for value in readers if value is not None and weight(value) is not None]
        own = all(weight(value) is not None and len(value.uses()) == 1 for value in (*makers, *layers))
        if makers and layers and len(layers) == len(uses) and own and not node.outputs[0].is_graph_output():
            yield _Site(node.outputs[0], tuple(makers), tuple(layers))


def _linear(value: ir.Value | None) -> list[ir.Value]:
    """Return weight and, if any, bias of the linear layer that computes ``value``; [] if it is read twice."""
    node = value.producer() if value is not None else None
    if node is None or sole_consumer(node.outputs[0]) is None:
        return []
    if node.op_type == "MatMul" and node.inputs[1] is not None and weight(node.inputs[1]) is not None:
        return [node.inputs[1]]
    if node.op_type == "Add":
        biases = [one for one in node.inputs if one is not None and weight(one) is not None]
        others = [found for one in node.inputs if (found := _linear(one))]
        return [*others[0], *biases] if len(biases) == len(others) == 1 else []
    return []


def _factors(magnitude: Floats, layers: Sequence[ir.Value]) -> Floats:
    rows = np.max([np.abs(_content(layer).numpy()).max(axis=1) for layer in layers], axis=0).astype(
        np.float32
    )
    factors = np.maximum(magnitude, 1e-5) ** _STRENGTH / np.maximum(rows, 1e-5) ** (1 - _STRENGTH)
    result: Floats = np.maximum(factors, 1e-5).astype(np.float32)
    return result


def _scale(value: ir.Value, factors: Array) -> None:
    """Multiply a weight by factors, lazily."""
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
