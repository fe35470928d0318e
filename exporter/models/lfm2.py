"""LFM2 and LFM2.5: gated short convolutions, and attention with norms of heads in some layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from ...errors import UnsupportedModelError
from .. import layers
from ..config import (
    DecoderConfig,
    ExpertsConfig,
    RawConfig,
    StateConfig,
    decoder_config,
    integer,
    number,
    rope_config,
    with_defaults,
)
from ..decoder import Decoder
from ..layers.recurrent import short_convolution

DEFAULTS: RawConfig = {
    "vocab_size": 65_536,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
NAMES = ("w1", "w3", "w2")  # of the gate, up and down projections
_KINDS = ("conv", "full_attention")


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. The first files have ``block_ff_dim``."""
    return hybrid_config(with_defaults(renamed(raw), DEFAULTS))


def renamed(raw: RawConfig) -> RawConfig:
    """Return config.json with the present name of ``tie_embedding``, which the first files have."""
    return {"tie_word_embeddings": raw["tie_embedding"], **raw} if "tie_embedding" in raw else raw


def hybrid_config(raw: RawConfig, experts: Sequence[ExpertsConfig | None] | None = None) -> DecoderConfig:
    """Return the configuration of layers of convolutions and of attention, from complete fields.

    Args:
        raw: config.json with all defaults.
        experts: each layer's experts, None for a dense layer; by default all are dense.
    """
    count, hidden = integer(raw, "num_hidden_layers"), integer(raw, "hidden_size")
    attending = raw.get("full_attn_idxs")
    attending = range(count) if attending is None else attending
    types = raw.get("layer_types") or [_KINDS[layer in attending] for layer in range(count)]
    unknown = sorted(set(types) - set(_KINDS))
    if unknown:
        raise UnsupportedModelError(
            f"layer type '{unknown[0]}' is not supported; supported: {', '.join(_KINDS)}"
        )
    bias = bool(raw["conv_bias"])
    state = StateConfig(
        channels=hidden,
        taps=integer(raw, "conv_L_cache"),
        bias=bias,
        projection_bias=bias,
        output_bias=bias,
    )
    rope = rope_config(raw)
    return decoder_config(
        # transformers does not read 'hidden_act' here: the layers are written with SiLU.
        {**raw, "rms_norm_eps": raw["norm_eps"], "intermediate_size": _width(raw), "hidden_act": "silu"},
        experts=experts,
        ropes=[rope if kind == "full_attention" else None for kind in types],
        states=[None if kind == "full_attention" else state for kind in types],
    )


def _width(raw: RawConfig) -> int:
    """Return the width of feed-forward layers: two thirds of the stated one, rounded up to a multiple."""
    width = integer(raw, "block_ff_dim", integer(raw, "intermediate_size"))
    if not raw["block_auto_adjust_ff_dim"]:
        return width
    width, multiple = int(2 * width / 3), integer(raw, "block_multiple_of")
    return -(-int(number(raw, "block_ffn_dim_multiplier") * width) // multiple) * multiple


def feed_forward(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the gated feed-forward layer of layer ``layer``."""
    with net.scope("feed_forward"):
        return layers.gated_linear_unit(net, x, NAMES, net.config.mlp_width(layer))


def build(
    net: Decoder,
    feed: Callable[[Decoder, int, ir.Value], ir.Value] = feed_forward,
    prefix: str = "model",
) -> ir.Value:
    """Write the decoder, with ``feed`` as its feed-forward layers, and return its logits."""
    c = net.config
    x = layers.embedding(net, f"{prefix}.embed_tokens")
    for layer in range(c.num_layers):
        mix = attention if c.state(layer) is None else gated_convolution
        with net.scope(f"{prefix}.layers.{layer}"):
            x = net.op("Add", x, mix(net, layer, layers.rms_norm(net, "operator_norm", x)))
            x = net.op("Add", x, feed(net, layer, layers.rms_norm(net, "ffn_norm", x)))
    x = layers.rms_norm(net, f"{prefix}.embedding_norm", x)
    return layers.lm_head(net, x, embedding_name=f"{prefix}.embed_tokens")


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention with RMSNorm of each query and key head."""
    c = net.config
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=False)
        q = layers.head_norm(net, "q_layernorm", q, c.num_heads)
        k = layers.head_norm(net, "k_layernorm", k, c.num_kv_heads)
        return layers.linear(net, "out_proj", layers.attention(net, layer, q, k, v), c.q_size, c.hidden_size)


def gated_convolution(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write out(c * convolution(b * x)), where b, c and x are three projections of the input."""
    state, hidden = net.config.state(layer), net.config.hidden_size
    assert state is not None  # noqa: S101 -- ``build`` has checked
    with net.scope("conv"):
        parts = {"in_proj.b": hidden, "in_proj.c": hidden, "in_proj.x": hidden}
        b, c, x = layers.split_linear(net, "in_proj", parts, x, hidden, bias=state.projection_bias)
        x = net.op("Transpose", net.without_padding(net.op("Mul", b, x)), perm=[0, 2, 1])
        x = short_convolution(net, layer, state, "conv", x, silu=False)
        x = net.op("Mul", c, net.op("Transpose", x, perm=[0, 2, 1]))
        return layers.linear(net, "out_proj", x, hidden, hidden, bias=state.output_bias)
