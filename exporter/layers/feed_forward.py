"""Feed-forward layers."""

from __future__ import annotations

import onnx_ir as ir

from ..decoder import Decoder
from .elementwise import activation
from .projections import linear


def gated_mlp(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the gated feed-forward layer of a decoder's layer; see ``gated_linear_unit``."""
    names = ("gate_proj", "up_proj", "down_proj")
    with net.scope("mlp"):
        return gated_linear_unit(net, x, names, net.config.mlp_width(layer), bias=net.config.mlp_bias)


def gated_linear_unit(
    net: Decoder, x: ir.Value, names: tuple[str, str, str], width: int, *, bias: bool = False
) -> ir.Value:
    """Write down(act(gate(x)) * up(x)), https://arxiv.org/abs/2002.05202, with ``width`` inner values.

    ``names`` are those of gate, up and down.
    """
    hidden = net.config.hidden_size
    gate, up = (linear(net, name, x, hidden, width, bias=bias) for name in names[:2])
    return linear(net, names[2], net.op("Mul", activation(net, gate), up), width, hidden, bias=bias)


def plain_mlp(net: Decoder, names: tuple[str, str], x: ir.Value, *, bias: bool = True) -> ir.Value:
    """Write the feed-forward layer down(act(up(x))); ``names`` are those of up and down."""
    hidden, inner = net.config.hidden_size, net.config.intermediate_size
    with net.scope("mlp"):
        x = activation(net, linear(net, names[0], x, hidden, inner, bias=bias))
        return linear(net, names[1], x, inner, hidden, bias=bias)
