"""Lower a mixture of experts to com.microsoft MoE for float weights, or QMoE for blocked ones.

    MoE(x, scores, W1, B1, W2, B2)      QMoE(x, scores, W1, S1, B1, W2, S2, B2, , , , Z1, Z2, , probabilities)

W1 is [experts, 2 * width, hidden] with interleaved rows of gate and up; W2 is [experts, hidden, width].
Scales S, zero points Z and optional biases B have the layout of their weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ...experts.mixture import Activation, Expert, Mixture, SoftmaxRouter, find_mixture
from ...graph.edit import (
    MICROSOFT,
    add_initializer,
    insert,
    nodes_of,
    remove_unused,
    replace,
    shared_constant,
    weight,
)
from ...graph.lazy import Array, lazy, shape_of, transpose
from ...passes.base import GraphPass
from ..kernels import ExpertKernels
from .blocked_weight import BlockedWeight, blocked_weight, packed_tensors

_ROUTER_WEIGHTS = 14  # index of QMoE's input router_weights

_Operands = list[ir.Value | None]


class FusedExpertsPass(GraphPass):
    """Fuse every mixture of experts that the target's kernels support.

    Args:
        kernels: the capabilities of MoE and QMoE.
        accuracy_level: see ``Kernels``.
    """

    def __init__(self, kernels: ExpertKernels, *, accuracy_level: int = 0) -> None:
        super().__init__()
        self.kernels = kernels
        self.accuracy_level = accuracy_level

    def rewrite(self, graph: ir.Graph) -> None:
        """Try every Split."""
        for node in nodes_of(graph, "Split"):
            found = find_mixture(node)
            if found is None:
                continue
            if isinstance(found, str):
                reason: str | None = found
            elif found.router is None:
                reason = "its experts are not selected by a softmax"
            elif any(expert.join is not None for expert in found.experts):
                reason = "the target's operator cannot be cut by ranks"
            else:
                reason = self._fuse(graph, found, found.router)
            if reason is None:
                self.fired += 1
            else:
                self.refuse(node, reason)

    def _fuse(self, graph: ir.Graph, mixture: Mixture, router: SoftmaxRouter) -> str | None:
        """Replace the mixture; return the reason if that is not possible."""
        if any(expert.up is None or expert.activation.name != "silu" for expert in mixture.experts):
            return "its experts' activation is not a gated SiLU"
        operands = [layer.weight for expert in mixture.experts for layer in expert.layers]
        if len({_traits(expert) for expert in mixture.experts}) > 1:
            return "the experts have different activations, or only some have biases"
        floats = [tensor for value in operands if (tensor := weight(value)) is not None]
        if len(floats) == len(operands):
            if not self.kernels.float_weights:
                return "the target has no MoE for float weights that is faster than separate experts"
            first, second = _stacked(graph, mixture, [[transpose(tensor)] for tensor in floats])
            biases = _biases(graph, mixture)
            _replace(graph, mixture, router, "MoE", [first[0], biases[0], second[0], biases[1]], {})
            return None
        blocked = [expert for value in operands if isinstance(expert := blocked_weight(value), BlockedWeight)]
        reason = self._misfit(blocked, len(operands))
        if reason is None:
            stacks = _stacked(graph, mixture, [packed_tensors(expert) for expert in blocked])
            inputs = self._operands(router, *stacks, _biases(graph, mixture))
            _replace(graph, mixture, router, "QMoE", inputs, self._attributes(blocked[0]))
        return reason

    def _misfit(self, weights: Sequence[BlockedWeight], products: int) -> str | None:
        if len(weights) < products:
            return "the weights of some experts are float, or have a type without a kernel"
        kinds = {
            (blocked.bits, blocked.block_size, blocked.axis, blocked.zero_points is None)
            for blocked in weights
        }
        first, kernels = weights[0], self.kernels
        if len(kinds) > 1 or first.axis != 0:
            return "the experts' weights differ in bits, block size or zero points"
        if first.bits not in kernels.bits:
            return f"the target has no QMoE for {first.bits} bits that is faster than separate experts"
        if any(
            blocked.inputs % max(kernels.multiple, blocked.block_size) or blocked.blocks == 1
            for blocked in weights
        ):
            return "the target's QMoE does not support experts of this size"
        if first.zero_points is not None and first.block_size < kernels.zero_point_block:
            return (
                f"the target's QMoE needs a block size of {kernels.zero_point_block} or more for zero points"
            )
        return None

    def _attributes(self, first: BlockedWeight) -> dict[str, int]:
        attributes = {"expert_weight_bits": first.bits, "block_size": first.block_size}
        if self.accuracy_level:
            attributes["accuracy_level"] = self.accuracy_level
        return attributes | ({"weights_prepacked": 0} if self.kernels.raw_weights else {})

    def _operands(
        self, router: SoftmaxRouter, first: list[ir.Value], second: list[ir.Value], biases: _Operands
    ) -> _Operands:
        points = [stack[2] if len(stack) > 2 else None for stack in (first, second)]
        operands: _Operands = [*first[:2], biases[0], *second[:2], biases[1], None, None, None, *points]
        if self.kernels.router_weights and not router.normalize:
            operands += [None] * (_ROUTER_WEIGHTS - 2 - len(operands)) + [router.probabilities]
        return operands


def _traits(expert: Expert) -> tuple[object, ...]:
    """Return a key that must be equal for all experts of one operator."""
    return expert.activation, *(layer.bias is not None for layer in expert.layers)


def _activation(activation: Activation) -> dict[str, float]:
    """Return the attributes of an activation that is not plain SiLU."""
    attributes = {"activation_alpha": activation.alpha, "activation_beta": activation.beta}
    if not math.isinf(activation.limit):
        attributes["swiglu_limit"] = activation.limit
    return {} if activation == Activation() else attributes


def _biases(graph: ir.Graph, mixture: Mixture) -> _Operands:
    """Register the biases of all experts as B1 and B2; None for one without biases."""
    name = str(mixture.experts[0].down.weight.name)
    sides = ("experts_in.bias", slice(0, 2)), ("experts_out.bias", slice(2, 3))
    operands: _Operands = []
    for side, part in sides:
        rows = [[weight(layer.bias) for layer in list(one.layers)[part]] for one in mixture.experts]
        stack = _stack_biases(rows)
        operands.append(None if stack is None else add_initializer(graph, f"{name}.{side}", stack))
    return operands


def _stack_biases(rows: Sequence[Sequence[ir.TensorProtocol | None]]) -> ir.LazyTensor | None:
    """Stack experts' biases; those of gate and up are interleaved, a missing one is zeros."""
    first = next((tensor for tensor in rows[0] if tensor is not None), None)
    if first is None:
        return None
    zeros = np.zeros(first.size, first.dtype.numpy())

    def compute() -> Array:
        parts = [[zeros if tensor is None else tensor.numpy() for tensor in row] for row in rows]
        return np.stack([np.stack(row, axis=-1).reshape(-1) for row in parts])

    return lazy(compute, first.dtype, (len(rows), len(rows[0]) * first.size))


def _stacked(
    graph: ir.Graph, found: Mixture, tensors: Sequence[Sequence[ir.TensorProtocol]]
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Register the tensors of all experts, given for gate, up and down of each, as those of W1 and of W2."""
    name = str(found.experts[0].down.weight.name)
    gate_up = zip(zip(*tensors[0::3], strict=True), zip(*tensors[1::3], strict=True), strict=True)
    first = [_stack([[*pair] for pair in zip(gates, ups, strict=True)]) for gates, ups in gate_up]
    second = [_stack([[down] for down in downs]) for downs in zip(*tensors[2::3], strict=True)]
    return (
        [add_initializer(graph, f"{name}.experts_in", tensor) for tensor in first],
        [add_initializer(graph, f"{name}.experts_out", tensor) for tensor in second],
    )


def _stack(experts: Sequence[Sequence[ir.TensorProtocol]]) -> ir.LazyTensor:
    """Stack experts; the rows of each expert's tensors are interleaved."""
    first = experts[0][0]
    rows, parts = shape_of(first)[0], len(experts[0])
    shape = (len(experts), parts * rows, first.size // rows)

    def compute() -> Array:
        result = np.empty(shape, first.dtype.numpy())
        for index, tensors in enumerate(experts):
            for part, tensor in enumerate(tensors):
                result[index, part::parts] = tensor.numpy().reshape(rows, -1)
        return result

    return lazy(compute, first.dtype, shape)


def _replace(
    graph: ir.Graph,
    mixture: Mixture,
    router: SoftmaxRouter,
    op_type: str,
    operands: _Operands,
    attributes: Mapping[str, int],
) -> None:
    mix = mixture.result.producer()
    if mix is None:
        raise AssertionError("unreachable: the result is that of a MatMul")
    common = {
        "k": mixture.per_token,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "normalize_routing_weights": int(router.normalize),
        **_activation(mixture.experts[0].activation),
    }
    inputs = [mixture.tokens, router.scores, *operands]
    fused = insert(mix, op_type, inputs, {**common, **attributes}, domain=MICROSOFT)
    fused.name = mix.name
    replace_result(graph, mixture.result, fused.outputs[0])


def replace_result(graph: ir.Graph, result: ir.Value, by_token: ir.Value) -> None:
    """Replace the result [tokens, 1, hidden] of a node by that of another operator, [tokens, hidden]."""
    node = result.producer()
    if node is None:
        raise AssertionError("unreachable: the result is that of a node")
    axis = shared_constant(graph, "moe.axis", np.array([1], np.int64))
    replace(result, insert(node, "Unsqueeze", [by_token, axis]).outputs[0])
    remove_unused(graph, node)
