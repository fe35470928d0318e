"""Choose, without a text, the weights of a float graph that lose most when they are rounded to 4 bits.

Two kinds of products lose most for their size. Keys and values are read by every later token, and grouped
heads make them small. Outputs of feed-forward layers hold single weights that carry much of the model's
quality (super weights, https://arxiv.org/abs/2411.07191): the layers with the largest ratio of the greatest
weight to the root mean square have them. The first and the last layer lose more than others, too, which
llama.cpp's Q4_K_M allows for by more bits at both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from ...experts.mixture import Mixture, find_mixture
from ...graph.edit import nodes_of, weight

Peak = Callable[[ir.TensorProtocol], float]

_SHARE = 4  # of this number of feed-forward outputs, one stays in 8 bits
_ENDS = 2
_QUERY, _KEY, _VALUE = range(3)  # inputs of Attention
# Operators between two products of one feed-forward layer: its activation, its gate and their layout.
_POINTWISE = frozenset(
    {"Add", "Cast", "Clip", "Div", "Erf", "Gelu", "HardSigmoid", "Identity", "LeakyRelu", "Max", "Min", "Mul"}
    | {"Pow", "Relu", "Reshape", "Sigmoid", "Slice", "Softplus", "Split", "Sqrt", "Sub", "Swish", "Tanh"}
)
_WALK = 64  # nodes between an operator and its product, at most


def peak(tensor: ir.TensorProtocol) -> float:
    """Return the greatest magnitude of a weight in units of its root mean square; 0 for zeros."""
    array = np.asarray(tensor.numpy(), np.float32).ravel()
    square = float(np.dot(array, array)) / max(array.size, 1)
    greatest = max(float(array.max(initial=0)), -float(array.min(initial=0)))
    return greatest / square**0.5 if square > 0 else 0.0


def sensitive_weights(graph: ir.Graph, peak_of: Peak = peak) -> list[ir.Value]:
    """Return the weights that should keep 8 bits where the others get 4.

    Keys and values of grouped heads; of feed-forward outputs a quarter, the first, the last, and those with
    the greatest peaks; and the whole first and last feed-forward layer, where they are less than a quarter of
    all. The experts of a mixture are one such layer, since kernels compute them together where they have one
    form. The number of weights of a decoder does not depend on their content.

    Args:
        graph: a portable float graph.
        peak_of: the order of feed-forward outputs, which reads each of them once.
    """
    outputs = _outputs(graph)
    chosen = (source for sources in _outlying(outputs, peak_of) for source in sources)
    both = (outputs[0], outputs[-1]) if len(outputs) > _SHARE * _ENDS else ()
    ends = (source for sources in both for source in _inputs_of_layer(sources))
    return [*dict.fromkeys([*_keys_and_values(graph), *ends, *chosen])]


def _keys_and_values(graph: ir.Graph) -> Iterator[ir.Value]:
    for node in nodes_of(graph, "Attention"):
        queries = set(_products_before(node.inputs[_QUERY]))
        width = max((_outputs_of(value) for value in queries), default=0)
        for value in node.inputs[_KEY : _VALUE + 1]:
            for source in _products_before(value):
                if source not in queries and _outputs_of(source) < width:
                    yield source


def _outputs(graph: ir.Graph) -> list[list[ir.Value]]:
    """Return the weights of products whose input is a pointwise function of others; a mixture's together."""
    sources = [
        source
        for node in nodes_of(graph, "MatMul")
        if (source := _weight_of(node)) is not None and _is_activation(node.inputs[0])
    ]
    mixtures = [find_mixture(node) for node in nodes_of(graph, "Split")]
    first = {
        expert.down.weight: mixture.experts[0].down.weight
        for mixture in mixtures
        if isinstance(mixture, Mixture)
        for expert in mixture.experts
    }
    groups: dict[ir.Value, list[ir.Value]] = {}
    for source in sources:
        groups.setdefault(first.get(source, source), []).append(source)
    return list(groups.values())


def _inputs_of_layer(outputs: Sequence[ir.Value]) -> Iterator[ir.Value]:
    """Yield the weights of the products whose activation a feed-forward output reads, such as gate and up."""
    for output in outputs:
        for use in output.uses():
            yield from _products_before(use.node.inputs[0])


def _outlying(outputs: Sequence[list[ir.Value]], peak_of: Peak) -> list[list[ir.Value]]:
    if len(outputs) <= _ENDS:
        return list(outputs)
    between = sorted(outputs[1:-1], key=lambda group: -max(_peak(value, peak_of) for value in group))
    return [outputs[0], outputs[-1], *between[: max(0, len(outputs) // _SHARE - _ENDS)]]


def _peak(value: ir.Value, peak_of: Peak) -> float:
    return 0.0 if value.const_value is None else peak_of(value.const_value)


def _is_activation(value: ir.Value | None) -> bool:
    """Return whether a value is a pointwise function, and not a linear one, of products with weights."""
    producer = None if value is None else value.producer()
    if producer is None or producer.op_type not in _POINTWISE:
        return False
    pending, seen, products = [value], set[ir.Value](), 0
    while pending and len(seen) < _WALK:
        current = pending.pop()
        if current is None or current in seen or weight(current) is not None:
            continue
        seen.add(current)
        producer = current.producer()
        if producer is None:
            return False
        if _weight_of(producer) is not None:
            products += 1
        elif producer.op_type in _POINTWISE and not producer.domain:
            pending += producer.inputs
        elif producer.op_type != "Constant":
            return False
    return products > 0 and not pending


def _products_before(value: ir.Value | None) -> Iterator[ir.Value]:
    """Yield the weights of the products that a value is computed from, up to each product."""
    pending, seen = [value], set[ir.Value]()
    while pending and len(seen) < _WALK:
        current = pending.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        producer = current.producer()
        if producer is None or producer.op_type == "Attention":
            continue
        source = _weight_of(producer)
        if source is None:
            pending += producer.inputs
        else:
            yield source


def _weight_of(node: ir.Node) -> ir.Value | None:
    """Return the weight of a product, the second operand of MatMul."""
    if node.op_type != "MatMul" or node.domain or weight(node.inputs[1]) is None:
        return None
    return node.inputs[1]


def _outputs_of(value: ir.Value) -> int:
    return 0 if value.const_value is None else int(value.const_value.shape.numpy()[-1])
