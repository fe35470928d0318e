"""EmbeddingGemma (https://arxiv.org/abs/2509.20354): the layers of Gemma 3 without a causal mask."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from ....errors import UnsupportedModelError
from ...config import RawConfig
from ...models import gemma3_text as decoder
from ..encoder import EncoderConfig, EncoderWriter

BASE = "model"
UNUSED = ("lm_head.",)


def config(raw: RawConfig, labels: int) -> EncoderConfig:
    """Normalise config.json; a window is half as wide to both sides as the one that it states.

    Raises:
        UnsupportedModelError: scores or logits are capped.
    """
    c = decoder.config({**raw, "use_bidirectional_attention": False})
    if c.attention_softcap or c.final_softcap:
        raise UnsupportedModelError("an encoder of Gemma 3 with capped scores or logits is not supported")
    return EncoderConfig(
        model_type=raw["model_type"],
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_layers=c.num_layers,
        num_heads=c.num_heads,
        max_tokens=c.max_position_embeddings,
        hidden_act=c.hidden_act,
        norm_eps=c.norm_eps,
        attention_bias=c.attention_bias,
        mlp_bias=False,
        windows=tuple(None if window is None else window // 2 for window in c.windows),
        ropes=tuple(c.ropes),
        labels=labels,
        kv_heads=c.num_kv_heads,
        head_size=c.head_dim,
        scale=c.attention_scale,
    )


def build(net: EncoderWriter, raw: RawConfig) -> ir.Value:
    """Write the encoder and return the normalized states of its last layer."""
    c = net.config
    x = net.op("Gather", net.table("embed_tokens", c.vocab_size), net.input_ids)
    x = net.op("Mul", x, net.constant(math.sqrt(c.hidden_size), np.float32, "embedding_scale"))
    for layer in range(c.num_layers):
        with net.scope(f"layers.{layer}"):
            y = _attention(net, layer, _norm(net, "input_layernorm", x))
            x = net.op("Add", x, _norm(net, "post_attention_layernorm", y))
            y = _mlp(net, _norm(net, "pre_feedforward_layernorm", x))
            x = net.op("Add", x, _norm(net, "post_feedforward_layernorm", y))
    return _norm(net, "norm", x)


def _norm(net: EncoderWriter, name: str, x: ir.Value, size: int | None = None) -> ir.Value:
    return net.rms_norm(name, x, size, view=decoder.one_plus)


def _attention(net: EncoderWriter, layer: int, x: ir.Value) -> ir.Value:
    c = net.config
    with net.scope("self_attn"):
        q, k, v = (
            net.linear(f"{name}_proj", x, c.hidden_size, size, bias=c.attention_bias)
            for name, size in (("q", c.q_size), ("k", c.kv_size), ("v", c.kv_size))
        )
        q, k = (
            net.joined_heads(_norm(net, f"{name}_norm", net.split_heads(y, heads), c.head_dim))
            for name, y, heads in (("q", q, c.num_heads), ("k", k, c.kv_heads or c.num_heads))
        )
        out = net.attention(layer, q, k, v)
        return net.linear("o_proj", out, c.q_size, c.hidden_size, bias=c.attention_bias)


def _mlp(net: EncoderWriter, x: ir.Value) -> ir.Value:
    hidden, inner = net.config.hidden_size, net.config.intermediate_size
    with net.scope("mlp"):
        gate = net.activation(net.linear("gate_proj", x, hidden, inner, bias=False))
        y = net.op("Mul", gate, net.linear("up_proj", x, hidden, inner, bias=False))
        return net.linear("down_proj", y, inner, hidden, bias=False)
