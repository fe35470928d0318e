"""Layers of Mamba-2."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from ..config import MambaConfig, RawConfig, integer
from ..decoder import Decoder
from ..weights import Array
from .elementwise import scaled
from .norms import plain_rms_norm
from .projections import linear, split_linear
from .recurrent import check_activation, repeated_heads, short_convolution


def mamba_config(
    raw: RawConfig, *, norm: bool = True, norm_first: bool = False, output_bias: bool | None = None
) -> MambaConfig:
    """Return the layer's configuration from the fields ``mamba_*`` of config.json.

    Time steps are in ``time_step_limit`` for every token. transformers bounds those of prompts only, so that
    a prompt in pieces would differ from the whole.

    Raises:
        UnsupportedModelError: its activation is not SiLU.
    """
    name = "mamba_hidden_act" if "mamba_hidden_act" in raw else "hidden_act"
    check_activation(name, raw.get(name, "silu"))
    hidden, heads = integer(raw, "hidden_size"), integer(raw, "mamba_n_heads")
    if raw.get("mamba_d_head", "auto") == "auto":
        stated = raw.get("mamba_d_ssm") is not None
        size = (integer(raw, "mamba_d_ssm") if stated else integer(raw, "mamba_expand") * hidden) // heads
    else:
        size = integer(raw, "mamba_d_head")
    groups, state_size = integer(raw, "mamba_n_groups"), integer(raw, "mamba_d_state")
    slowest, fastest = raw.get("time_step_limit") or (0.0, math.inf)
    projection_bias = bool(raw["mamba_proj_bias"])
    return MambaConfig(
        channels=heads * size + 2 * groups * state_size,
        taps=integer(raw, "mamba_d_conv"),
        bias=bool(raw["mamba_conv_bias"]),
        heads=heads,
        key_heads=groups,
        key_size=state_size,
        value_size=size,
        projection_bias=projection_bias,
        output_bias=projection_bias if output_bias is None else output_bias,
        norm=norm,
        norm_first=norm_first,
        slowest=float(slowest),
        fastest=float(fastest),
    )


def mamba(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write a layer of Mamba-2 (Dao and Gu, https://arxiv.org/abs/2405.21060).

    Its recurrence is linear attention with gates: B is the keys, C the queries, the inputs times their time
    steps are the values, and the time steps times a negative rate of each head are the decays.

    Args:
        net: the graph to write into, in the scope of the layer.
        layer: the layer, whose configuration has a ``MambaConfig``.
        x: [batch, sequence, hidden].
    """
    state = net.config.state(layer)
    assert isinstance(state, MambaConfig)  # noqa: S101 -- the family's configuration has made it
    inner, groups = state.heads * state.value_size, state.key_heads * state.key_size
    hidden, (gate_scale, *mixed_scales, rate_scale) = net.config.hidden_size, state.scales
    x = scaled(net, x, state.input_scale)
    parts = {"in_proj.gate": inner, "in_proj.mixed": state.channels, "in_proj.rate": state.heads}
    gate, mixed, rate = split_linear(net, "in_proj", parts, x, hidden, bias=state.projection_bias)
    if set(mixed_scales) != {1.0}:
        factors = np.repeat(mixed_scales, (inner, groups, groups))
        mixed = net.op("Mul", mixed, net.constant(factors, np.float32, "scales"))
    mixed = net.op("Transpose", net.without_padding(mixed), perm=[0, 2, 1])
    mixed = short_convolution(net, layer, state, "conv1d", mixed, silu=True)
    mixed = net.op("Transpose", mixed, perm=[0, 2, 1])
    if state.bias:
        mixed = net.without_padding(mixed)
    values, keys, queries = net.ops("Split", mixed, net.ints(inner, groups, groups), num_outputs=3, axis=-1)
    out = _recurrence(net, layer, state, values, keys, queries, scaled(net, rate, rate_scale))
    out = _gated_norm(net, state, out, scaled(net, gate, gate_scale))
    out = linear(net, "out_proj", out, inner, hidden, bias=state.output_bias)
    return scaled(net, out, state.output_scale)


def _recurrence(
    net: Decoder,
    layer: int,
    state: MambaConfig,
    values: ir.Value,
    keys: ir.Value,
    queries: ir.Value,
    rate: ir.Value,
) -> ir.Value:
    """Write the state space model; ``rate`` is the time steps before their bias and softplus."""
    steps = net.op("Softplus", net.op("Add", rate, net.weight("dt_bias", state.heads)))
    if state.slowest > 0 or state.fastest < math.inf:
        limits = (net.constant(limit, np.float32, "limit") for limit in (state.slowest, state.fastest))
        steps = net.op("Clip", steps, *limits)
    decay = net.op("Mul", steps, net.weight("A_log", state.heads, view=negative_power, new_name="A"))
    by_head = net.op("Reshape", values, net.ints(0, 0, state.heads, state.value_size))
    inputs = net.op("Mul", by_head, net.op("Unsqueeze", steps, net.ints(-1)))
    shape = net.ints(0, 0, state.heads * state.value_size)
    out, present = net.ops(
        "LinearAttention",
        repeated_heads(net, queries, state),
        repeated_heads(net, keys, state),
        net.op("Reshape", inputs, shape),
        net.past_states[layer, "recurrent"],
        decay,
        num_outputs=2,
        update_rule="gated",
        q_num_heads=state.heads,
        kv_num_heads=state.heads,
        scale=1.0,
    )
    net.set_state(layer, "recurrent", present)
    skip = net.weight("D", state.heads, view=lambda array: array[:, np.newaxis])
    return net.op("Add", out, net.op("Reshape", net.op("Mul", by_head, skip), shape))


def _gated_norm(net: Decoder, state: MambaConfig, x: ir.Value, gate: ir.Value) -> ir.Value:
    """Write x * silu(gate), with RMSNorm by group in front or behind if the layer has one."""
    gate = net.op("Mul", gate, net.op("Sigmoid", gate))
    if not state.norm:
        return net.op("Mul", x, gate)
    if not state.norm_first:
        x = net.op("Mul", x, gate)
    inner = state.heads * state.value_size
    size = inner // state.key_heads
    with net.scope("norm"):
        x = net.op("Reshape", x, net.ints(0, 0, state.key_heads, size))
        x = net.op("Reshape", plain_rms_norm(net, x, size), net.ints(0, 0, inner))
        x = net.op("Mul", x, net.weight("weight", inner))
    return net.op("Mul", x, gate) if state.norm_first else x


def negative_power(logarithms: Array) -> Array:
    """Return -exp(A_log), float32: the negative rates of decay."""
    return -np.exp(logarithms.astype(np.float32))
