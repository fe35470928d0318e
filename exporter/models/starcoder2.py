"""StarCoder 2: LayerNorm, biases, a feed-forward layer without a gate, sliding window."""

from __future__ import annotations

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, integer, with_defaults
from ..decoder import Decoder
from .llama import attention

DEFAULTS: RawConfig = {
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "use_bias": True,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    raw = with_defaults(raw, DEFAULTS)
    renamed = {
        "rms_norm_eps": raw["norm_epsilon"],
        "attention_bias": raw["use_bias"],
        "mlp_bias": raw["use_bias"],
    }
    return decoder_config(
        {**raw, **renamed}, windows=[raw.get("sliding_window")] * integer(raw, "num_hidden_layers")
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    c = net.config
    x = layers.embedding(net, "model.embed_tokens")
    for layer in range(c.num_layers):
        with net.scope(f"model.layers.{layer}"):
            x = net.op("Add", x, attention(net, layer, layers.layer_norm(net, "input_layernorm", x)))
            y = layers.layer_norm(net, "post_attention_layernorm", x)
            x = net.op("Add", x, layers.plain_mlp(net, ("c_fc", "c_proj"), y, bias=c.mlp_bias))
    x = layers.layer_norm(net, "model.norm", x)
    return layers.lm_head(net, x, embedding_name="model.embed_tokens")
