"""EmbeddingGemma 2, whose texts alone are read, not its pictures and sounds.

The layers are those of Gemma 3 without a causal mask, with norms as in Gemma 4. A third part of each layer
mixes in a projection of the embedding of the token.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from ....errors import UnsupportedModelError
from ...config import RawConfig, integer, layer_windows, mapping, number, rope_config
from ..encoder import EncoderConfig, EncoderWriter

BASE = "language_model"
UNUSED = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")
_THETAS = {"sliding_attention": 10_000.0, "full_attention": 1_000_000.0}


def config(raw: RawConfig, labels: int) -> EncoderConfig:
    """Normalise config.json; the window of a sliding layer is a distance to both sides.

    Raises:
        UnsupportedModelError: a layer has a setting of its own that is not known.
    """
    raw = _text(raw)
    kinds = raw["layer_types"]
    return EncoderConfig(
        model_type=raw["model_type"],
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=integer(raw, "hidden_size"),
        intermediate_size=integer(raw, "intermediate_size"),
        num_layers=integer(raw, "num_hidden_layers"),
        num_heads=integer(raw, "num_attention_heads"),
        max_tokens=integer(raw, "max_position_embeddings"),
        hidden_act=raw.get("hidden_activation", "gelu_pytorch_tanh"),
        norm_eps=number(raw, "rms_norm_eps", 1e-6),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=False,
        windows=tuple(layer_windows(kinds, integer(raw, "sliding_window", 512))),
        ropes=tuple(
            rope_config(
                {**raw, "head_dim": _heads(raw, layer)[1]},
                {"rope_theta": _THETAS[kind], **mapping(mapping(raw, "rope_parameters"), kind)},
            )
            for layer, kind in enumerate(kinds)
        ),
        labels=labels,
        scale=1.0,
        output_size=integer(raw, "embedding_dim", 768),
    )


def build(net: EncoderWriter, raw: RawConfig) -> ir.Value:
    """Write the encoder and return the projected states of its last layer."""
    c, raw = net.config, _text(raw)
    x = net.op("Gather", net.table("embed_tokens", c.vocab_size), net.input_ids)
    x = net.op("Mul", x, net.constant(math.sqrt(c.hidden_size), np.float32, "embedding_scale"))
    size = integer(raw, "hidden_size_per_layer_input", 512)
    of_token = _projected_token(net, x, size)
    for layer in range(c.num_layers):
        with net.scope(f"layers.{layer}"):
            y = _attention(net, layer, net.rms_norm("input_layernorm", x), *_heads(raw, layer))
            x = net.op("Add", x, net.rms_norm("post_attention_layernorm", y))
            y = _mlp(net, net.rms_norm("pre_feedforward_layernorm", x))
            x = net.op("Add", x, net.rms_norm("post_feedforward_layernorm", y))
            part = net.op("Gather", of_token, net.constant(layer, np.int64, "layer"), axis=2)
            x = net.op("Mul", _mixed(net, x, part, size), net.weight("layer_scalar", 1))
    return net.linear(
        "embedding_projection", net.rms_norm("norm", x), c.hidden_size, c.output_size or 0, bias=False
    )


def _text(raw: RawConfig) -> RawConfig:
    """Return the part of config.json on texts, with the kinds of its layers.

    Raises:
        UnsupportedModelError: a layer has a setting of its own that is not known.
    """
    raw = {**raw, **mapping(raw, "text_config"), "model_type": raw["model_type"]}
    count = integer(raw, "num_hidden_layers")
    kinds = list(raw.get("layer_types") or ["sliding_attention"] * 5 + ["full_attention"])
    kinds = (kinds * count)[:count]
    kinds[-1] = "full_attention"
    for layer, settings in mapping(raw, "per_layer_config").items():
        if unknown := sorted(set(settings) - {"head_dim", "num_key_value_heads"}):
            raise UnsupportedModelError(
                f"embedding_gemma2 with {unknown[0]} of layer {layer} in per_layer_config is not supported"
            )
    return {**raw, "layer_types": kinds}


def _heads(raw: RawConfig, layer: int) -> tuple[int, int]:
    """Return the number of heads of keys and values of a layer, and the width of a head."""
    full = raw["layer_types"][layer] == "full_attention"
    settings = mapping(raw, "per_layer_config").get(str(layer))
    if settings is None:
        settings = (
            {"head_dim": 512, "num_key_value_heads": 1} if full and "per_layer_config" not in raw else {}
        )
    own = {**{key: raw[key] for key in ("head_dim", "num_key_value_heads") if key in raw}, **settings}
    return integer(own, "num_key_value_heads", 2), integer(own, "head_dim", 256)


def _projected_token(net: EncoderWriter, x: ir.Value, size: int) -> ir.Value:
    """Return the embeddings of tokens projected for each layer, [batch, sequence, layers, size]."""
    c = net.config
    with net.scope("ple"):
        y = net.linear("per_layer_model_projection", x, c.hidden_size, c.num_layers * size, bias=False)
        y = net.op("Mul", y, net.constant(c.hidden_size**-0.5, np.float32, "projection_scale"))
        y = net.op("Reshape", y, net.ints(0, 0, c.num_layers, size))
        return net.rms_norm("per_layer_projection_norm", y, size)


def _mixed(net: EncoderWriter, x: ir.Value, of_token: ir.Value, size: int) -> ir.Value:
    hidden = net.config.hidden_size
    with net.scope("ple_block"):
        gate = net.activation(net.linear("per_layer_input_gate", x, hidden, size, bias=False))
        y = net.linear("per_layer_projection", net.op("Mul", gate, of_token), size, hidden, bias=False)
        return net.op("Add", x, net.rms_norm("post_per_layer_input_norm", y))


def _attention(net: EncoderWriter, layer: int, x: ir.Value, kv_heads: int, size: int) -> ir.Value:
    c = net.config
    counts = {"q": c.num_heads, "k": kv_heads, "v": kv_heads}
    with net.scope("self_attn"):
        parts = {
            name: net.split_heads(
                net.linear(f"{name}_proj", x, c.hidden_size, heads * size, bias=c.attention_bias), heads, size
            )
            for name, heads in counts.items()
        }
        ones = net.constant(np.ones(size), np.float32, f"ones_{size}")
        normed = {
            "q": net.rms_norm("q_norm", parts["q"], size),
            "k": net.rms_norm("k_norm", parts["k"], size),
            "v": net.op("RMSNormalization", parts["v"], ones, axis=-1, epsilon=c.norm_eps),
        }
        q, k, v = (net.joined_heads(value) for value in normed.values())
        out = net.attention(layer, q, k, v, kv_heads=kv_heads)
        return net.linear("o_proj", out, c.num_heads * size, c.hidden_size, bias=c.attention_bias)


def _mlp(net: EncoderWriter, x: ir.Value) -> ir.Value:
    hidden, inner = net.config.hidden_size, net.config.intermediate_size
    with net.scope("mlp"):
        gate = net.activation(net.linear("gate_proj", x, hidden, inner, bias=False))
        y = net.op("Mul", gate, net.linear("up_proj", x, hidden, inner, bias=False))
        return net.linear("down_proj", y, inner, hidden, bias=False)
