"""Replace com.microsoft MoE and QMoE by the canonical mixture of experts with plain linear layers.

The result follows the operators' documentation. One kernel deviates from it: without
normalize_routing_weights and router_weights, QMoE of onnxruntime 1.31.1 normalises on the CPU, but not on
CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from ....records import dataclass
from ...experts.expert_tensors import BlockedExperts, ExpertLayer, ExpertTensors, FloatExperts
from ...experts.mixture import Activation
from ...experts.write_mixture import ExpertWeights, Routing, write_mixture
from ...graph.edit import (
    MICROSOFT,
    float_attribute,
    int_attribute,
    nodes_of,
    remove_unused,
    replace,
    text_attribute,
    weight,
)
from ..base import GraphPass

_ACTIVATIONS = ("silu", "gelu", "relu", "identity")
_SWIGLU = "swiglu"
_ROUTER_WEIGHTS = 14  # index of QMoE's input router_weights
_INTERLEAVED, _IN_HALVES = 1, 2  # swiglu_fusion: the layout of gate and up in FC1


@dataclass(frozen=True, slots=True)
class _Weights:
    """An operator's weights. FC1 holds gate and up, or FC3 holds up."""

    fc1: ExpertTensors
    fc2: ExpertTensors
    fc3: ExpertTensors | None


class LiftMoEPass(GraphPass):
    """Replace MoE and QMoE."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace every node that the canonical form can express."""
        for node in [*nodes_of(graph, "MoE", MICROSOFT), *nodes_of(graph, "QMoE", MICROSOFT)]:
            reason = _lift(graph, node)
            if reason is None:
                self.fired += 1
            else:
                self.refuse(node, reason)


def _lift(graph: ir.Graph, node: ir.Node) -> str | None:
    """Replace a node; return the reason if that is not possible."""
    activation, weights, routing, x = _activation(node), _weights(node), _routing(node), node.inputs[0]
    if isinstance(activation, str):
        return activation
    if isinstance(weights, str):
        return weights
    fusion = int_attribute(node, "swiglu_fusion", 0) if _is_swiglu(node) else 0
    reason = _misfit(node, weights, fusion)
    if reason is not None or routing is None or x is None:
        return reason or "its router input is missing"
    gate, up, down = _layers(weights, fusion)
    count, _, hidden = weights.fc1.shape
    experts = [
        ExpertWeights(
            gate.of(index, graph, node),
            None if up is None else up.of(index, graph, node),
            down.of(index, graph, node),
        )
        for index in range(count)
    ]
    result = write_mixture(node, x, routing, experts, hidden=hidden, activation=activation)
    replace(node.outputs[0], result)
    remove_unused(graph, node)
    return None


def _activation(node: ir.Node) -> Activation | str:
    name = text_attribute(node, "activation_type", "relu")
    if name in _ACTIVATIONS:
        return Activation(name)
    if name != _SWIGLU:
        return f"its activation {name} is not supported"
    alpha, beta = (
        float_attribute(node, "activation_alpha", 1.0),
        float_attribute(node, "activation_beta", 0.0),
    )
    return Activation("silu", alpha, beta, float_attribute(node, "swiglu_limit", math.inf))


def _is_swiglu(node: ir.Node) -> bool:
    return text_attribute(node, "activation_type", "relu") == _SWIGLU


def _layers(weights: _Weights, fusion: int) -> tuple[ExpertLayer, ExpertLayer | None, ExpertLayer]:
    """Return gate, up and down."""
    fc1, down = weights.fc1, ExpertLayer(weights.fc2)
    if not fusion:
        return ExpertLayer(fc1), None if weights.fc3 is None else ExpertLayer(weights.fc3), down
    half = fc1.shape[1] // 2
    turns = slice(0, None, 2), slice(1, None, 2)
    gate, up = turns if fusion == _INTERLEAVED else (slice(half), slice(half, None))
    return ExpertLayer(fc1, gate, ".gate"), ExpertLayer(fc1, up, ".up"), down


def _routing(node: ir.Node) -> Routing | None:
    scores = _input(node, 1)
    if scores is None:
        return None
    weights = _input(node, _ROUTER_WEIGHTS) if node.op_type == "QMoE" else None
    softmax = weights.producer() if weights is not None else None
    if softmax is not None and softmax.op_type == "Softmax" and softmax.inputs[0] is scores:
        weights = None
    normalize = bool(int_attribute(node, "normalize_routing_weights", 0))
    return Routing(scores, int_attribute(node, "k", 1), normalize, weights)


def _misfit(node: ir.Node, weights: _Weights, fusion: int) -> str | None:
    """Return why a node cannot be written in canonical form, None if it can."""
    if int_attribute(node, "use_sparse_mixer", 0):
        return "it routes by SparseMixer instead of a top-k softmax"
    if fusion not in (0, _INTERLEAVED, _IN_HALVES):
        return f"swiglu_fusion {fusion} is not supported"
    if _is_swiglu(node) and (weights.fc3 is None) != bool(fusion):
        return "SwiGLU needs either FC3 or gate and up in FC1"
    count, outputs, hidden = weights.fc1.shape
    width = outputs // 2 if fusion else outputs
    others = [weights.fc2.shape, (count, hidden, width)]
    if weights.fc3 is not None:
        others += [weights.fc3.shape, (count, width, hidden)]
    if others[0::2] != others[1::2]:
        return (
            "the shapes of its weights do not match; export weights packed for CUDA with weights_prepacked 0"
        )
    return None


def _weights(node: ir.Node) -> _Weights | str:
    read = _quantized if node.op_type == "QMoE" else _float
    found = [read(node, index) for index in range(3)]
    if any(isinstance(one, str) for one in found):
        return next(one for one in found if isinstance(one, str))
    fc1, fc2, fc3 = [one for one in found if not isinstance(one, str)]
    return _Weights(fc1, fc2, fc3) if fc1 is not None and fc2 is not None else "FC1 or FC2 is missing"


def _float(node: ir.Node, index: int) -> ExpertTensors | str | None:
    """Return the weights of MoE's layer ``index``, None if it has none, or why they cannot be used."""
    values = [_input(node, 2 + 2 * index), _input(node, 3 + 2 * index)]
    if values[0] is None:
        return None
    tensors = [weight(value) for value in values]
    if _is_computed(values, tensors) or tensors[0] is None:
        return "its weights are not constant"
    return FloatExperts(str(values[0].name), tensors[1], tensors[0])


def _quantized(node: ir.Node, index: int) -> ExpertTensors | str | None:
    """Return the weights of QMoE's layer ``index``, None if it has none, or why they cannot be used."""
    values = [_input(node, place + 3 * index) for place in (2, 3, 4)] + [_input(node, 11 + index)]
    if values[0] is None:
        return None
    tensors = [weight(value) for value in values]
    packed, scales, bias, points = tensors
    if _is_computed(values, tensors) or packed is None or scales is None:
        return "its weights or scales are not constant"
    bits = int_attribute(
        node, f"fc{index + 1}_expert_weight_bits", int_attribute(node, "expert_weight_bits", 4)
    )
    kind = text_attribute(node, "quant_type", "int")
    if kind != "int" or bits not in (4, 8) or packed.dtype != ir.DataType.UINT8:
        return f"its {bits}-bit weights of quant_type {kind} cannot be expressed in standard ONNX"
    if int_attribute(node, "weights_prepacked", -1) == 1:
        return "its weights are packed for CUDA; export the model with weights_prepacked 0"
    if points is not None and points.dtype != ir.DataType.UINT8:
        return "its zero points are not uint8"
    block_size = int_attribute(node, "block_size", 0)
    return BlockedExperts(str(values[0].name), bias, packed, scales, points, bits, block_size)


def _is_computed(values: Sequence[ir.Value | None], tensors: Sequence[ir.TensorProtocol | None]) -> bool:
    return any(value is not None and tensor is None for value, tensor in zip(values, tensors, strict=True))


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if len(node.inputs) > index else None
