"""Normalizations over the last axis."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..decoder import Decoder
from .projections import View


def rms_norm(
    net: Decoder,
    name: str,
    x: ir.Value,
    size: int | None = None,
    *,
    view: View | None = None,
    epsilon: float | None = None,
) -> ir.Value:
    """Write RMSNormalization (https://arxiv.org/abs/1910.07467) over the last axis."""
    epsilon = net.config.norm_eps if epsilon is None else epsilon
    with net.scope(name):
        weight = net.weight("weight", size or net.config.hidden_size, view=view)
        return net.op("RMSNormalization", x, weight, axis=-1, epsilon=epsilon)


def plain_rms_norm(net: Decoder, x: ir.Value, size: int) -> ir.Value:
    """Write RMSNormalization without a weight over the last axis, of ``size`` elements."""
    ones = net.constant(np.ones(size), np.float32, f"ones_{size}")
    return net.op("RMSNormalization", x, ones, axis=-1, epsilon=net.config.norm_eps)


def head_norm(
    net: Decoder, name: str, x: ir.Value, num_heads: int, *, view: View | None = None, size: int | None = None
) -> ir.Value:
    """Apply ``rms_norm`` to each head of x [batch, sequence, heads * size], by default head_dim."""
    size = size or net.config.head_dim
    with net.scope(name):
        heads = net.op("Reshape", x, net.ints(0, 0, num_heads, size))
    normed = rms_norm(net, name, heads, size, view=view)
    with net.scope(name):
        return net.op("Reshape", normed, net.ints(0, 0, num_heads * size))


def layer_norm(net: Decoder, name: str, x: ir.Value, *, bias: bool = True) -> ir.Value:
    """Write LayerNormalization (https://arxiv.org/abs/1607.06450) over the last axis."""
    size = net.config.hidden_size
    with net.scope(name):
        operands = [net.weight("weight", size), *([net.weight("bias", size)] if bias else [])]
        return net.op("LayerNormalization", x, *operands, axis=-1, epsilon=net.config.norm_eps)
