"""Activation functions, factors and caps: one value in, one value of the same shape out."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...errors import UnsupportedModelError
from ..decoder import Decoder


def activation(net: Decoder, x: ir.Value) -> ir.Value:
    """Apply the activation function ``hidden_act`` of the configuration.

    Raises:
        UnsupportedModelError: the function is not supported.
    """
    match net.config.hidden_act:
        case "silu" | "swish":
            return net.op("Mul", x, net.op("Sigmoid", x))
        case "gelu":
            return net.op("Gelu", x)
        case "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh":
            return net.op("Gelu", x, approximate="tanh")
        case "relu":
            return net.op("Relu", x)
        case "relu2":
            x = net.op("Relu", x)
            return net.op("Mul", x, x)
        case name:
            known = "silu, swish, gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, relu, relu2"
            raise UnsupportedModelError(f"activation '{name}' is not supported; supported: {known}")


def scaled(net: Decoder, x: ir.Value, factor: float) -> ir.Value:
    """Return x * factor; x itself for a factor of 1."""
    return x if factor == 1 else net.op("Mul", x, net.constant(factor, np.float32, "scale"))


def softcap(net: Decoder, x: ir.Value, cap: float | None) -> ir.Value:
    """Return cap * tanh(x / cap), or x if ``cap`` is None."""
    if cap is None:
        return x
    limit = net.constant(cap, np.float32, "softcap")
    return net.op("Mul", net.op("Tanh", net.op("Div", x, limit)), limit)
