"""EuroBERT (https://arxiv.org/abs/2503.05500): the layers of Llama, without a causal mask."""

from __future__ import annotations

import onnx_ir as ir

from ....errors import UnsupportedModelError
from ...config import RawConfig, integer, number, rope_config
from ..encoder import EncoderConfig, EncoderWriter
from ..encoder import classify_tokens as classify_tokens

BASE = "model"
UNUSED = ("lm_head.", "rotary_emb.")


def config(raw: RawConfig, labels: int) -> EncoderConfig:
    """Normalise config.json."""
    raw = {"max_position_embeddings": 8192, "rope_theta": 10_000.0, **raw}
    count, heads = integer(raw, "num_hidden_layers"), integer(raw, "num_attention_heads")
    return EncoderConfig(
        model_type=raw["model_type"],
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=integer(raw, "hidden_size"),
        intermediate_size=integer(raw, "intermediate_size"),
        num_layers=count,
        num_heads=heads,
        max_tokens=integer(raw, "max_position_embeddings"),
        hidden_act=raw.get("hidden_act", "silu"),
        norm_eps=number(raw, "rms_norm_eps", 1e-5),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        ropes=(rope_config(raw),) * count,
        labels=labels,
        kv_heads=integer(raw, "num_key_value_heads", heads),
        head_size=integer(raw, "head_dim", integer(raw, "hidden_size") // max(heads, 1)),
    )


def build(net: EncoderWriter, raw: RawConfig) -> ir.Value:
    """Write the encoder and return the normalized states of its last layer."""
    c = net.config
    x = net.op("Gather", net.table("embed_tokens", c.vocab_size), net.input_ids)
    for layer in range(c.num_layers):
        with net.scope(f"layers.{layer}"):
            x = net.op("Add", x, _attention(net, layer, net.rms_norm("input_layernorm", x)))
            x = net.op("Add", x, _mlp(net, net.rms_norm("post_attention_layernorm", x)))
    return net.rms_norm("norm", x)


def classify(net: EncoderWriter, raw: RawConfig, states: ir.Value, base: str) -> ir.Value:
    """Write the head of ``EuroBertForSequenceClassification`` and return the logits."""
    size = net.config.hidden_size
    pooling = raw.get("classifier_pooling", "late")
    match pooling:
        case "bos":
            x = net.first_token(states)
        case "mean":
            x = net.mean_token(states)
        case "late":
            x = states
        case _:
            raise UnsupportedModelError(
                f"classifier_pooling '{pooling}' is not supported; supported: bos, late, mean"
            )
    x = net.activation(net.linear("dense", x, size, size), "gelu")
    logits = net.linear("classifier", x, size, net.config.labels)
    return net.mean_token(logits) if pooling == "late" else logits


def _attention(net: EncoderWriter, layer: int, x: ir.Value) -> ir.Value:
    c = net.config
    with net.scope("self_attn"):
        q = net.linear("q_proj", x, c.hidden_size, c.q_size, bias=c.attention_bias)
        k, v = (
            net.linear(name, x, c.hidden_size, c.kv_size, bias=c.attention_bias)
            for name in ("k_proj", "v_proj")
        )
        return net.linear(
            "o_proj", net.attention(layer, q, k, v), c.q_size, c.hidden_size, bias=c.attention_bias
        )


def _mlp(net: EncoderWriter, x: ir.Value) -> ir.Value:
    c = net.config
    hidden, inner = c.hidden_size, c.intermediate_size
    with net.scope("mlp"):
        gate = net.activation(net.linear("gate_proj", x, hidden, inner, bias=c.mlp_bias))
        up = net.linear("up_proj", x, hidden, inner, bias=c.mlp_bias)
        return net.linear("down_proj", net.op("Mul", gate, up), inner, hidden, bias=c.mlp_bias)
