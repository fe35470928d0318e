"""Layers with a recurrent state: short convolutions, and linear attention by the gated delta rule."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ...errors import UnsupportedModelError
from ..config import StateConfig
from ..decoder import Decoder

_L2_EPSILON = 1e-6  # that of the checkpoints' code, inside the root


def check_activation(name: str, activation: object) -> None:
    """Refuse an activation behind short convolutions that is not SiLU, the only one with an operator.

    Raises:
        UnsupportedModelError: it is another one.
    """
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"recurrent layers with {name} '{activation}' are not supported")


def short_convolution(
    net: Decoder,
    layer: int,
    state: StateConfig,
    name: str,
    x: ir.Value,
    *,
    silu: bool,
    parts: Sequence[str] = (),
) -> ir.Value:
    """Write a causal depthwise convolution over the last ``state.taps`` tokens.

    Args:
        net: the graph to write into.
        layer: the layer, whose state holds the inputs of earlier tokens.
        state: its sizes.
        name: name of the checkpoint's module, with a weight [channels, 1, taps].
        x: [batch, channels, sequence].
        silu: whether SiLU follows.
        parts: modules in place of ``name``, if the checkpoint has one for each of as many equal parts.

    Returns:
        [batch, channels, sequence].
    """
    names = [net.qualified(f"{part}.weight") for part in parts]
    with net.scope(name):
        if names:
            shape = (state.channels // len(names), 1, state.taps)
            weight = net.initializer(net.checkpoint.joined(names, shape, net.qualified("weight")))
        else:
            weight = net.weight("weight", state.channels, 1, state.taps)
        offset = net.weight("bias", state.channels) if state.bias else None
        past = net.past_states[layer, "conv"]
        out, present = net.ops(
            "CausalConvWithState",
            x,
            weight,
            offset,
            past,
            num_outputs=2,
            activation="silu" if silu else "none",
        )
    net.set_state(layer, "conv", present)
    return out


def delta_attention(
    net: Decoder,
    layer: int,
    state: StateConfig,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    decay: ir.Value,
    beta: ir.Value,
) -> ir.Value:
    """Write linear attention by the gated delta rule (Yang et al., https://arxiv.org/abs/2412.06464).

    Queries and keys are scaled to length 1. A head of keys may serve several heads of values.

    Args:
        net: the graph to write into.
        layer: the layer, whose state is [batch, heads, key size, value size].
        state: its sizes.
        q: [batch, sequence, key heads * key size].
        k: the same.
        v: [batch, sequence, heads * value size].
        decay: [batch, sequence, heads or heads * key size], logarithms of at most 0.
        beta: [batch, sequence, heads], in [0, 1].

    Returns:
        [batch, sequence, heads * value size].
    """
    out, present = net.ops(
        "LinearAttention",
        *(_unit_heads(net, x, state) for x in (q, k)),
        *(v, net.past_states[layer, "recurrent"], decay, beta),
        num_outputs=2,
        update_rule="gated_delta",
        q_num_heads=state.heads,
        kv_num_heads=state.heads,
        scale=1.0 / math.sqrt(state.key_size),
    )
    net.set_state(layer, "recurrent", present)
    return out


def _unit_heads(net: Decoder, x: ir.Value, state: StateConfig) -> ir.Value:
    """Return x with heads of length 1, repeated so that there is one for each head of values.

    x / sqrt(sum of squares + e) is RMSNormalization with a weight of 1 / sqrt(n) and e / n.
    """
    size = state.key_size
    heads = net.op("Reshape", x, net.ints(0, 0, state.key_heads, size))
    weight = net.constant(np.full(size, size**-0.5), np.float32, f"unit_{size}")
    heads = net.op("RMSNormalization", heads, weight, axis=-1, epsilon=_L2_EPSILON / size)
    return _repeated(net, heads, state)


def repeated_heads(net: Decoder, x: ir.Value, state: StateConfig) -> ir.Value:
    """Return queries or keys [batch, sequence, key heads * key size] with a head for each head of values."""
    if state.key_heads == state.heads:
        return x
    return _repeated(net, net.op("Reshape", x, net.ints(0, 0, state.key_heads, state.key_size)), state)


def _repeated(net: Decoder, heads: ir.Value, state: StateConfig) -> ir.Value:
    repeats = state.heads // state.key_heads
    if repeats > 1:
        numbers = np.arange(state.key_heads)
        order = np.tile(numbers, repeats) if state.in_turns else np.repeat(numbers, repeats)
        heads = net.op("Gather", heads, net.constant(order, np.int64, "heads_of_keys"), axis=2)
    return net.op("Reshape", heads, net.ints(0, 0, state.heads * state.key_size))
