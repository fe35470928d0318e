"""Chains and the nodes that they replace, computed with stand-ins for products and attention.

A stand-in is a fixed function of its operands and attributes. So a chain and its nodes give equal arrays
exactly if the program has the right steps, operands and places.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from carryall.graph_opt.lower.chain.program import ABSENT, ADD, ATTENTION, GATE, LINEAR, NORM, PART

Array = npt.NDArray[Any]
_OPERANDS = {ADD: 3, NORM: 2, GATE: 1, PART: 1, LINEAR: 3, ATTENTION: 14}
_FACTS = {ADD: 0, NORM: 1, GATE: 0, PART: 1, LINEAR: 6, ATTENTION: 11}
_LINEAR = ("inputs", "outputs", "bits", "block_size", "group_size", "offsets")
_SIZES = ("num_heads", "kv_num_heads", "head_size", "block_size", "window", "rotary_dim", "interleaved")


def run_program(numbers: Array, inputs: Sequence[Array]) -> list[Array]:
    """Return the outputs of a program; its registers are memory that later steps overwrite."""
    _, _, _, lead, registers, outputs, steps, *rest = map(int, numbers)
    widths, rest = rest[:registers], rest[registers:]
    rows = inputs[lead].reshape(-1, inputs[lead].shape[-1])
    memory = [np.full((len(rows), max(width, 1)), np.nan, np.float32) for width in widths]

    def value(place: int) -> Array | None:
        if place == ABSENT:
            return None
        return memory[-1 - place] if place < 0 else inputs[place]

    for _ in range(steps):
        kind, out, count = rest[0], -1 - rest[1], 2 + _OPERANDS[rest[0]]
        operands = [value(place) for place in rest[2:count]]
        facts, rest = rest[count : count + _FACTS[kind]], rest[count + _FACTS[kind] :]
        if kind == PART:
            assert operands[0] is not None
            memory[out] = operands[0][:, facts[0] : facts[0] - widths[out]]
            continue
        assert widths[out] > 0
        memory[out][:] = _STEPS[kind](facts, *operands).reshape(len(rows), -1)
    assert not rest
    return memory[:outputs]


def run_nodes(graph: ir.Graph, given: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs of a graph of nodes that a chain may hold."""
    values: dict[ir.Value | None, Array | None] = {value: given[str(value.name)] for value in graph.inputs}
    values |= {value: value.const_value.numpy() for value in graph.initializers.values() if value.const_value}
    values[None] = None
    for node in graph:
        results = _NODES[node.op_type](node, *(values[value] for value in node.inputs))
        values |= dict(zip(node.outputs, results, strict=False))
    return {str(value.name): np.asarray(values[value]) for value in graph.outputs}


def _fixed(width: int, *seeds: Array | bytes) -> Array:
    """Return a matrix that depends on ``seeds`` only, with ``width`` columns and 64 rows."""
    digest = hashlib.sha256(b"".join(seed if isinstance(seed, bytes) else seed.tobytes() for seed in seeds))
    rng = np.random.default_rng(np.frombuffer(digest.digest(), np.uint32))
    return rng.integers(-2, 3, (64, width)).astype(np.float32)


def _linear(facts: Sequence[int], x: Array, tiles: Array, bias: Array | None) -> Array:
    product = x.reshape(-1, facts[0]) @ _fixed(facts[1], tiles, repr(list(facts)).encode())[: facts[0]]
    return product if bias is None else product + bias


def _attention(facts: Sequence[int], query: Array, *rest: Array | None) -> Array:
    parts = [
        one.reshape(len(query.reshape(-1, query.shape[-1])), -1)
        for one in (query, *rest[:2])
        if one is not None
    ]
    rows = np.concatenate(parts, axis=1)
    seeds = [one for one in rest[2:] if one is not None]
    return rows @ _fixed(facts[0] * facts[2], *seeds, repr(list(facts)).encode())[: rows.shape[1]]


def _norm(facts: Sequence[int], x: Array, scale: Array) -> Array:
    heads = x.reshape(-1, len(scale))
    bits = np.array(facts[0], np.uint32).view(np.float32)
    return np.asarray(heads / np.sqrt((heads * heads).mean(axis=1, keepdims=True) + bits) * scale)


def _add(_: Sequence[int], x: Array, other: Array, bias: Array | None) -> Array:
    total = x.reshape(-1, x.shape[-1]) + other.reshape(-1, x.shape[-1])
    return total if bias is None else total + bias


def _gate(_: Sequence[int], x: Array) -> Array:
    first, second = np.split(x.reshape(-1, x.shape[-1]), 2, axis=1)
    return np.asarray(first / (1 + np.exp(-first)) * second)


def _attribute(node: ir.Node, name: str) -> Any:
    found = node.attributes.get(name)
    return 0 if found is None else found.value


def _bits(value: float) -> int:
    return int(np.array(value, np.float32).view(np.uint32))


def _as_rows(like: Array, found: Array) -> Array:
    return found.reshape(*like.shape[:2], -1)


def _linear_node(node: ir.Node, x: Array, tiles: Array, bias: Array | None = None) -> list[Array]:
    return [_as_rows(x, _linear([_attribute(node, name) for name in _LINEAR], x, tiles, bias))]


def _attention_node(node: ir.Node, *operands: Array) -> list[Array]:
    facts = [_attribute(node, name) for name in (*_SIZES, "cache_type")]
    facts += [
        _bits(_attribute(node, "scale")),
        _bits(_attribute(node, "softcap")),
        _attribute(node, "reads_only"),
    ]
    return [_as_rows(operands[0], _attention(facts, *operands))]


def _norm_node(node: ir.Node, x: Array, scale: Array) -> list[Array]:
    return [_norm([_bits(_attribute(node, "epsilon"))], x, scale).reshape(x.shape)]


def _skip_norm_node(
    node: ir.Node, x: Array, skip: Array, scale: Array, bias: Array | None = None
) -> list[Array]:
    total = _as_rows(x, _add((), x, skip, bias))
    return [*_norm_node(node, total, scale), total, total, total]


def _split_node(node: ir.Node, x: Array, sizes: Array) -> list[Array]:
    return list(np.split(x, np.cumsum(sizes)[:-1], axis=-1))


_STEPS: dict[int, Callable[..., Array]] = {
    ADD: _add,
    NORM: _norm,
    GATE: _gate,
    LINEAR: _linear,
    ATTENTION: _attention,
}
_NODES: dict[str, Callable[..., list[Array]]] = {
    "QuantizedLinear": _linear_node,
    "PagedAttention": _attention_node,
    "SiluAndMul": lambda _, x: [_as_rows(x, _gate((), x))],
    "RMSNormalization": _norm_node,
    "SkipSimplifiedLayerNormalization": _skip_norm_node,
    "Add": lambda _, x, other: [x + other],
    "Split": _split_node,
    "BranchwiseRMSNorm": _norm_node,
    "Neg": lambda _, x: [-x],
    "Chain": lambda _, program, *inputs: [
        _as_rows(inputs[int(program[3])], found) for found in run_program(program, inputs)
    ],
}
