"""GPT-2: learned positions, LayerNorm, linear layers stored [in, out]."""

from __future__ import annotations

import onnx_ir as ir

from ...errors import UnsupportedModelError
from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, integer, with_defaults
from ..decoder import Decoder

DEFAULTS: RawConfig = {
    "n_positions": 1024,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose keys have other names than Llama's."""
    raw = with_defaults(raw, DEFAULTS)
    if raw.get("add_cross_attention"):
        raise UnsupportedModelError("GPT-2 with add_cross_attention is not supported")
    if raw.get("scale_attn_by_inverse_layer_idx"):
        raise UnsupportedModelError("GPT-2 with scale_attn_by_inverse_layer_idx is not supported")
    width, num_layers = integer(raw, "n_embd"), integer(raw, "n_layer")
    renamed = {
        "hidden_size": width,
        "intermediate_size": raw.get("n_inner") or 4 * width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": raw.get("n_head"),
        "num_key_value_heads": raw.get("n_head"),  # transformers ignores it, and head_dim
        "head_dim": None,
        "max_position_embeddings": raw["n_positions"],
        "hidden_act": raw["activation_function"],
        "rms_norm_eps": raw["layer_norm_epsilon"],
        "query_pre_attn_scalar": None if raw.get("scale_attn_weights", True) else 1,
    }
    scores = ("query_pre_attn_scalar",)
    return decoder_config({**raw, **renamed}, ropes=[None] * num_layers, scores=scores)


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    c = net.config
    net.checkpoint.ignore(".attn.bias", ".attn.masked_bias")  # causal masks, stored by old versions
    # The original checkpoints have no prefix.
    prefix = "" if "wte.weight" in net.checkpoint else "transformer."
    x = layers.embedding(net, f"{prefix}wte")
    with net.scope(f"{prefix}wpe"):
        positions = net.weight("weight", c.max_position_embeddings, c.hidden_size)
        x = net.op("Add", x, net.op("Gather", positions, net.position_ids))
    for layer in range(c.num_layers):
        with net.scope(f"{prefix}h.{layer}"):
            x = net.op("Add", x, attention(net, layer, layers.layer_norm(net, "ln_1", x)))
            x = net.op("Add", x, mlp(net, layers.layer_norm(net, "ln_2", x)))
    x = layers.layer_norm(net, f"{prefix}ln_f", x)
    return layers.lm_head(net, x, embedding_name=f"{prefix}wte")


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Multi-head self-attention."""
    size = net.config.hidden_size
    with net.scope("attn"):
        parts = {"q_proj": size, "k_proj": size, "v_proj": size}
        q, k, v = layers.split_linear(net, "c_attn", parts, x, size, bias=True, stored_in_out=True)
        out = layers.attention(net, layer, q, k, v)
        return layers.linear(net, "c_proj", out, size, size, bias=True, stored_in_out=True)


def mlp(net: Decoder, x: ir.Value) -> ir.Value:
    """Feed-forward layer."""
    size, inner = net.config.hidden_size, net.config.intermediate_size
    with net.scope("mlp"):
        x = layers.activation(net, layers.linear(net, "c_fc", x, size, inner, bias=True, stored_in_out=True))
        return layers.linear(net, "c_proj", x, inner, size, bias=True, stored_in_out=True)
