"""Conversions of the standard's operators with recurrent states, of opset 27. Imports openvino.

OpenVINO 2026.4 reads neither ``LinearAttention`` nor ``CausalConvWithState``. The first becomes a loop over
tokens. Its body for a gated delta rule with one decay a head has the form that OpenVINO's own pass
``GatedDeltaNetFusion`` looks for, so such layers run as its kernel ``GatedDeltaNet``; others stay loops.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino
from openvino import opset13 as ops

_HEADS_FIRST = [0, 2, 1, 3]
_TOKENS = 2  # the axis of tokens in [batch, heads, tokens, ...]
_END = np.iinfo(np.int64).max
_RULES = {
    "linear": (False, False),
    "gated": (True, False),
    "delta": (False, True),
    "gated_delta": (True, True),
}


def linear_attention(node: Any) -> list[Any]:
    """Convert LinearAttention: per token S = exp(decay) S + k (x) beta (v - k S), y = scale q S.

    Without the gate, decay is 0; without the delta rule, (x) has v alone.

    Raises:
        ValueError: queries have other heads than states.
    """
    query, key, value, state, decay, beta = _operands(node, 6)
    heads, queries = node.get_attribute("kv_num_heads"), node.get_attribute("q_num_heads")
    gated, delta = _RULES[node.get_attribute("update_rule", "gated_delta")]
    if heads != queries:
        raise ValueError(f"LinearAttention has {queries} heads of queries and {heads} of states")
    query, key, value = (_by_head(operand, heads) for operand in (query, key, value))
    key_size, value_size = _width(key), _width(value)
    if state is None:
        shape = ops.concat([_sizes(query, 0), _ints(heads), _ints(key_size), _ints(value_size)], axis=0)
        state = ops.broadcast(_float(0), shape).output(0)
    scale = (node.get_attribute("scale", 0.0) or key_size**-0.5) * math.sqrt(key_size)
    if not math.isclose(scale, 1.0, rel_tol=1e-6):
        query = ops.multiply(query, _float(scale))
    # The fusion takes the root of the width for a scale only if it is computed from the shape.
    width = ops.convert(ops.gather(ops.shape_of(query), _index(3), _index(0)), "f32")
    rows = {
        "q": ops.divide(ops.transpose(query, _ints(*_HEADS_FIRST)), ops.power(width, _float(0.5))),
        "k": ops.transpose(key, _ints(*_HEADS_FIRST)),
        "v": ops.transpose(value, _ints(*_HEADS_FIRST)),
    }
    if gated:
        rows["g"] = _gates(decay, heads)
    if delta:
        beta = beta if _width(beta) == heads else ops.tile(beta, _ints(1, 1, heads))
        rows["b"] = ops.transpose(beta, _ints(0, 2, 1))
    out, last = _loop(rows, state)
    merged = ops.reshape(
        ops.transpose(out, _ints(*_HEADS_FIRST)), _ints(0, 0, heads * value_size), special_zero=True
    )
    return [merged.output(0), last]


def causal_convolution(node: Any) -> list[Any]:
    """Convert CausalConvWithState: a depthwise convolution of the state's columns and the tokens."""
    tokens, weights, bias, state = _operands(node, 4)
    channels, taps = weights.get_partial_shape()[0].get_length(), _width(weights)
    if state is None:
        shape = ops.concat([_sizes(tokens, 0), _ints(channels), _ints(taps - 1)], axis=0)
        state = ops.broadcast(_float(0), shape)
    columns = ops.concat([state, tokens], axis=_TOKENS)
    filters = ops.reshape(weights, _ints(channels, 1, 1, taps), special_zero=False)
    out = ops.group_convolution(columns, filters, [1], [0], [0], [1])
    if bias is not None:
        out = ops.add(out, ops.reshape(bias, _ints(1, channels, 1), special_zero=False))
    if node.get_attribute("activation", "none") in ("silu", "swish"):
        out = ops.swish(out)
    last = ops.slice(columns, _ints(1 - taps or _END), _ints(_END), _ints(1), _ints(_TOKENS))
    return [out.output(0), last.output(0)]


def _loop(rows: dict[str, Any], state: Any) -> tuple[Any, Any]:
    """Return a loop's outputs: [batch, heads, tokens, value size], and the last state.

    Args:
        rows: [batch, heads, tokens, size] of q, k and v; decays g and factors b, or only some of them, as
            [batch, heads, tokens] or by key as [batch, heads, tokens, key size].
        state: [batch, heads, key size, value size].
    """
    step, before = _parameter([], openvino.Type.i32), _parameter([-1] * 4)
    written = _parameter([-1] * 4)
    tokens = {
        name: _parameter([1 if axis == _TOKENS else -1 for axis in range(_rank(operand))])
        for name, operand in rows.items()
    }
    q, k, v = (ops.squeeze(tokens[name], _index(_TOKENS)) for name in "qkv")
    k = ops.unsqueeze(k, _ints(-1))
    kept = before
    if "g" in tokens:
        by_key = _rank(rows["g"]) == len(_HEADS_FIRST)
        decay = ops.exp(ops.squeeze(tokens["g"], _index(_TOKENS)) if by_key else tokens["g"])
        kept = ops.multiply(before, ops.unsqueeze(decay, _ints(-1)))
    if "b" in tokens:
        recalled = ops.reduce_sum(ops.multiply(kept, k), _ints(-2), keep_dims=False)
        v = ops.multiply(ops.subtract(v, recalled), tokens["b"])
    after = ops.add(kept, ops.multiply(k, ops.unsqueeze(v, _ints(-2))))
    y = ops.reduce_sum(ops.multiply(after, ops.unsqueeze(q, _ints(-1))), _ints(-2), keep_dims=True)
    place = ops.unsqueeze(step, _ints(0))
    filled = ops.scatter_update(written, place, y, _index(_TOKENS))
    goes_on = ops.constant(np.array([True]))
    body = openvino.Model(
        [goes_on, after, filled],
        [step, *(tokens[name] for name in "qkv"), before, *(tokens[n] for n in "gb" if n in tokens), written],
        "recurrence",
    )
    shape = ops.shape_of(rows["v"])
    count = ops.convert(ops.gather(shape, _ints(_TOKENS), _index(0)), "i32")
    loop = openvino.op.loop(count.output(0), ops.constant(np.array([True])).output(0))
    loop.set_function(body)
    for name, parameter in tokens.items():
        loop.set_sliced_input(parameter, rows[name].output(0), 0, 1, 1, -1, _TOKENS)
    loop.set_merged_input(before, state, after.output(0))
    loop.set_merged_input(written, ops.broadcast(_float(0), shape).output(0), filled.output(0))
    loop.set_special_body_ports([0, 0])
    return loop.get_iter_value(filled.output(0), -1), loop.get_iter_value(after.output(0), -1)


def _gates(decay: Any, heads: int) -> Any:
    """Return decays [batch, heads, tokens], or those by key [batch, heads, tokens, key size]."""
    if _width(decay) == heads:
        return ops.transpose(decay, _ints(0, 2, 1))
    return ops.transpose(_by_head(decay, heads), _ints(*_HEADS_FIRST))


def _operands(node: Any, count: int) -> list[Any]:
    """Return the inputs; None for an absent one, in whose place OpenVINO puts a node."""
    inputs = [node.get_input(index) for index in range(node.get_input_size())]
    present = [None if value.get_node().get_type_name() == "NullNode" else value for value in inputs]
    return [*present, *[None] * (count - len(present))]


def _by_head(packed: Any, heads: int) -> Any:
    """Return [batch, tokens, heads * size] as [batch, tokens, heads, size]."""
    return ops.reshape(packed, _ints(0, 0, heads, _width(packed) // heads), special_zero=True)


def _shape(value: Any) -> Any:
    return (value if isinstance(value, openvino.Output) else value.output(0)).get_partial_shape()


def _width(value: Any) -> int:
    """Return the size of the last axis."""
    shape = _shape(value)
    size: int = shape[shape.rank.get_length() - 1].get_length()
    return size


def _rank(value: Any) -> int:
    rank: int = _shape(value).rank.get_length()
    return rank


def _sizes(value: Any, axis: int) -> Any:
    return ops.gather(ops.shape_of(value), _ints(axis), _index(0))


def _parameter(shape: list[int], dtype: Any = openvino.Type.f32) -> Any:
    return openvino.op.Parameter(dtype, openvino.PartialShape(shape))


def _ints(*numbers: int) -> Any:
    return ops.constant(np.array(numbers, np.int64))


def _index(number: int) -> Any:
    return ops.constant(np.array(number, np.int64))


def _float(number: float) -> Any:
    array: npt.NDArray[np.float32] = np.array(number, np.float32)
    return ops.constant(array)
