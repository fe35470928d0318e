"""gpt-oss: sinks of attention, a window in every other layer, experts stored as stacks, with biases."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .. import layers
from ..config import (
    DecoderConfig,
    ExpertsConfig,
    RawConfig,
    decoder_config,
    integer,
    layer_windows,
    number,
    with_defaults,
)
from ..decoder import Decoder
from ..layers.experts import SoftmaxRoute, StackedForm, sparse_mlp

DEFAULTS: RawConfig = {
    "attention_bias": True,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
YARN: RawConfig = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
# The softmax over the selected experts' scores is that over all, scaled to a sum of 1.
ROUTE = SoftmaxRoute("router", bias=True)


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. Without ``layer_types``, every other layer has a window, from the first on."""
    raw = with_defaults(raw, DEFAULTS)
    if not raw.get("rope_parameters") and not raw.get("rope_scaling"):
        raw = {**raw, "rope_parameters": YARN}
    num_layers = integer(raw, "num_hidden_layers")
    types = raw.get("layer_types") or [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)
    ]
    experts = ExpertsConfig(
        scope="mlp",
        # transformers 5 may write num_experts
        count=integer(raw, "num_experts", integer(raw, "num_local_experts")),
        per_token=integer(raw, "num_experts_per_tok"),
        width=integer(raw, "intermediate_size"),
        normalize=True,
        names=("gate_proj", "up_proj", "down_proj"),
        alpha=number(raw, "swiglu_alpha"),
        limit=number(raw, "swiglu_limit"),
    )
    return decoder_config(
        raw, windows=layer_windows(types, raw["sliding_window"]), experts=[experts] * num_layers
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return layers.pre_norm_decoder(net, attention=attention, mlp=mlp)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention with a sink for each head."""
    c = net.config
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=c.attention_bias)
        out = layers.attention_with_sinks(net, layer, q, k, v, net.weight("sinks", c.num_heads))
        return layers.linear(net, "o_proj", out, c.q_size, c.hidden_size, bias=c.attention_bias)


def mlp(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the mixture of experts of the layer."""
    experts = net.config.experts[layer]
    if experts is None:
        raise AssertionError("unreachable: every layer has experts")
    return sparse_mlp(net, x, experts, route=ROUTE, expert=expert, stacked=StackedForm(bias=True, beta=1.0))


def expert(net: Decoder, x: ir.Value, index: int, experts: ExpertsConfig) -> ir.Value:
    """Write expert ``index``: down((min(g, limit) * sigmoid(alpha * g)) * (clip(u) + 1)), x [n, hidden]."""
    limits = [net.constant(value, np.float32, "limit") for value in (-experts.limit, experts.limit)]
    with net.scope("experts"):
        gate = _expert_linear(net, "gate_up_proj", "gate_proj", x, index, slice(0, None, 2))
        up = _expert_linear(net, "gate_up_proj", "up_proj", x, index, slice(1, None, 2))
        with net.scope(str(index)):
            gate = net.op("Clip", gate, None, limits[1])
            up = net.op("Clip", up, *limits)
            silu = net.op("Mul", gate, net.op("Sigmoid", layers.scaled(net, gate, experts.alpha)))
            product = net.op("Mul", silu, net.op("Add", up, net.constant(1, np.float32, "one")))
        return _expert_linear(net, "down_proj", "down_proj", product, index, slice(None))


def _expert_linear(net: Decoder, stored: str, part: str, x: ir.Value, index: int, outputs: slice) -> ir.Value:
    """Write one expert's layer, whose weight is a part of the stack [experts, in, out].

    Quantized checkpoints have a matrix [out, in] for each expert instead: MXFP4 one for gate and up
    (``exporter/quantized/float4.py``), GGUF one for each, and a stack of the biases of each.
    """
    count = next(one.count for one in net.config.experts if one is not None)
    hidden, width = net.config.hidden_size, net.config.intermediate_size
    name = f"{index}.{part}"
    if net.qualified(f"{name}.weight") in net.checkpoint:
        rows, columns = (width, hidden) if part == "down_proj" else (hidden, width)
        weight = net.weight(f"{name}.weight", columns, rows, view=np.transpose)
        bias = net.weight(
            f"{part}.bias", count, columns, view=_part(index, slice(None)), new_name=f"{name}.bias"
        )
        return _product(net, name, x, weight, bias)
    rows, columns = (hidden, 2 * width) if stored == "gate_up_proj" else (width, hidden)
    if net.qualified(stored) in net.checkpoint:
        weight = net.weight(
            stored, count, rows, columns, view=_part(index, outputs), new_name=f"{name}.weight"
        )
    else:
        alone = f"{stored}.{index}.weight"
        weight = net.weight(
            alone, columns, rows, view=lambda array: array[outputs].T, new_name=f"{name}.weight"
        )
    bias = net.weight(f"{stored}_bias", count, columns, view=_part(index, outputs), new_name=f"{name}.bias")
    return _product(net, name, x, weight, bias)


def _product(net: Decoder, name: str, x: ir.Value, weight: ir.Value, bias: ir.Value) -> ir.Value:
    with net.scope(name):
        return net.op("Add", net.op("MatMul", x, weight), bias)


def _part(index: int, outputs: slice) -> layers.View:
    return lambda array: array[index][..., outputs]
