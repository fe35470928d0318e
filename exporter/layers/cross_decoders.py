"""The decoder layers of BART's descendants: self-attention, cross-attention and a feed-forward layer.

Published by Lewis et al., https://arxiv.org/abs/1910.13461. Whisper, mBART and TrOCR have the same layers and
names, with norms in front of each part or behind it.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ..decoder import Decoder
from .cached_attention import attention, cross_attention
from .elementwise import activation
from .norms import layer_norm
from .projections import linear


def cross_decoder_layer(net: Decoder, layer: int, x: ir.Value, *, key_bias: bool = True) -> ir.Value:
    """Write one layer, in the scope of its weights; x is [batch, sequence, hidden].

    Args:
        net: the graph to write into.
        layer: its number.
        x: the states in front of it.
        key_bias: whether the keys have a bias.
    """

    def attend(x: ir.Value) -> ir.Value:
        with net.scope("self_attn"):
            q, k, v = _projected(net, x, x, net.config.hidden_size, key_bias)
            return _joined(net, attention(net, layer, q, k, v))

    def look(x: ir.Value) -> ir.Value:
        rows = net.encoder_states
        if rows is None:
            raise AssertionError("unreachable: a decoder of such layers has an encoder")
        with net.scope("encoder_attn"):
            q, k, v = _projected(net, x, rows, net.config.encoder_width, key_bias)
            return _joined(net, cross_attention(net, layer, q, k, v))

    x = _residual(net, "self_attn_layer_norm", x, attend)
    x = _residual(net, "encoder_attn_layer_norm", x, look)
    return _residual(net, "final_layer_norm", x, lambda x: _mlp(net, x))


def _residual(net: Decoder, norm: str, x: ir.Value, part: Callable[[ir.Value], ir.Value]) -> ir.Value:
    if net.config.norm_first:
        return net.op("Add", x, part(layer_norm(net, norm, x)))
    return layer_norm(net, norm, net.op("Add", x, part(x)))


def _projected(
    net: Decoder, x: ir.Value, source: ir.Value, width: int, key_bias: bool
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return queries of x, and keys and values of ``source`` of this width."""
    c = net.config
    q = linear(net, "q_proj", x, c.hidden_size, c.q_size, bias=True)
    k = linear(net, "k_proj", source, width, c.q_size, bias=key_bias)
    return q, k, linear(net, "v_proj", source, width, c.q_size, bias=True)


def _joined(net: Decoder, x: ir.Value) -> ir.Value:
    return linear(net, "out_proj", x, net.config.q_size, net.config.hidden_size, bias=True)


def _mlp(net: Decoder, x: ir.Value) -> ir.Value:
    hidden, inner = net.config.hidden_size, net.config.intermediate_size
    x = activation(net, linear(net, "fc1", x, hidden, inner, bias=True))
    return linear(net, "fc2", x, inner, hidden, bias=True)
