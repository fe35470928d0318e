"""Kimi Delta Attention (https://arxiv.org/abs/2510.26692): the delta rule with decay by key channel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ..config import StateConfig
from ..decoder import Decoder
from ..weights import Array
from .elementwise import scaled
from .norms import head_norm
from .projections import linear
from .recurrent import delta_attention, short_convolution

_PARTS = ("q", "k", "v")


def kimi_state(heads: int, size: int, taps: int) -> StateConfig:
    """Return the state of a layer with ``heads`` heads of ``size`` keys and values."""
    return StateConfig(
        channels=3 * heads * size, taps=taps, heads=heads, key_heads=heads, key_size=size, value_size=size
    )


def kimi_delta(
    net: Decoder,
    layer: int,
    x: ir.Value,
    *,
    decay: Callable[[Decoder, StateConfig, ir.Value], ir.Value],
    gate: Callable[[Decoder, ir.Value, int], ir.Value],
    output: str = "o_proj",
) -> ir.Value:
    """Write a layer in the current scope: convolutions, the delta rule, a norm of heads, and a gate.

    Args:
        net: the graph to write into.
        layer: the layer, which has a state of ``kimi_state``.
        x: [batch, sequence, hidden].
        decay: returns the logarithms of decay [batch, sequence, heads * size], at most 0.
        gate: returns the gate of the outputs, before the sigmoid, given their number.
        output: the last projection.
    """
    state = net.config.state(layer)
    assert state is not None  # noqa: S101 -- the caller has looked
    hidden, width = net.config.hidden_size, state.heads * state.value_size
    x = net.without_padding(x)
    mixed = net.op("Concat", *(linear(net, f"{part}_proj", x, hidden, width) for part in _PARTS), axis=-1)
    mixed = net.op("Transpose", mixed, perm=[0, 2, 1])
    convolutions = [f"{part}_conv1d" for part in _PARTS]
    mixed = short_convolution(net, layer, state, "conv1d", mixed, silu=True, parts=convolutions)
    mixed = net.op("Transpose", mixed, perm=[0, 2, 1])
    q, k, v = net.ops("Split", mixed, net.ints(width, width, width), num_outputs=3, axis=-1)
    beta = net.op("Sigmoid", linear(net, "b_proj", x, hidden, state.heads))
    out = delta_attention(net, layer, state, q, k, v, decay(net, state, x), beta)
    out = head_norm(net, "o_norm", out, state.heads, size=state.value_size)
    out = net.op("Mul", out, net.op("Sigmoid", gate(net, x, width)))
    return linear(net, output, out, width, hidden)


def softplus_decay(net: Decoder, state: StateConfig, rate: ir.Value, stored: tuple[int, ...]) -> ir.Value:
    """Return -exp(A_log) * softplus(rate + dt_bias); ``A_log`` has the shape ``stored``."""
    power = net.op("Softplus", _biased(net, state, rate))
    return net.op("Mul", power, net.weight("A_log", *stored, view=_by_channel(state, -1.0), new_name="A"))


def bounded_decay(
    net: Decoder, state: StateConfig, rate: ir.Value, stored: tuple[int, ...], lowest: float
) -> ir.Value:
    """Return lowest * sigmoid(exp(A_log) * (rate + dt_bias)); ``A_log`` has the shape ``stored``."""
    power = net.weight("A_log", *stored, view=_by_channel(state, 1.0), new_name="A")
    share = net.op("Sigmoid", net.op("Mul", _biased(net, state, rate), power))
    return scaled(net, share, lowest)


def _biased(net: Decoder, state: StateConfig, rate: ir.Value) -> ir.Value:
    return net.op("Add", rate, net.weight("dt_bias", state.heads * state.key_size))


def _by_channel(state: StateConfig, sign: float) -> Callable[[Array], Array]:
    """Return a view of logarithms of heads as their powers, one for each key channel."""

    def view(logarithms: Array) -> Array:
        powers = sign * np.exp(logarithms.astype(np.float32)).reshape(-1)
        return np.repeat(powers, state.key_size)

    return view
