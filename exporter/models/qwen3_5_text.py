"""Qwen 3.5, 3.6 and 3.8, text: layers of the gated delta rule, and attention with a gate of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from ...errors import UnsupportedModelError
from ...records import dataclass
from .. import layers
from ..config import (
    DecoderConfig,
    ExpertsConfig,
    RawConfig,
    StateConfig,
    decoder_config,
    integer,
    rope_config,
    with_defaults,
)
from ..decoder import Decoder
from ..layers.draft_heads import MTP
from ..layers.draft_heads import draft_head as write_draft_head
from ..layers.experts import mlp
from ..layers.mamba import negative_power
from ..layers.projections import View
from ..layers.recurrent import check_activation, delta_attention, short_convolution
from ..weights import Array
from .gemma3_text import norm, one_plus

DEFAULTS: RawConfig = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_KINDS = ("linear_attention", "full_attention")


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. The positions of text are equal in all three parts of the rotary embedding."""
    return hybrid_config(with_defaults(raw, DEFAULTS))


def hybrid_config(raw: RawConfig, experts: Sequence[ExpertsConfig | None] | None = None) -> DecoderConfig:
    """Return the configuration of layers of the delta rule and of attention, from complete fields.

    Args:
        raw: config.json with all defaults.
        experts: each layer's experts, None for a dense layer; by default all are dense.
    """
    check_activation("hidden_act", raw.get("hidden_act", "silu"))
    interval = integer(raw, "full_attention_interval")
    types = raw.get("layer_types") or [
        _KINDS[(layer + 1) % interval == 0] for layer in range(integer(raw, "num_hidden_layers"))
    ]
    unknown = sorted(set(types) - set(_KINDS))
    if unknown:
        raise UnsupportedModelError(
            f"layer type '{unknown[0]}' is not supported; supported: {', '.join(_KINDS)}"
        )
    heads, size = integer(raw, "linear_num_value_heads"), integer(raw, "linear_value_head_dim")
    key_heads, key_size = integer(raw, "linear_num_key_heads"), integer(raw, "linear_key_head_dim")
    state = StateConfig(
        channels=2 * key_heads * key_size + heads * size,
        taps=integer(raw, "linear_conv_kernel_dim"),
        heads=heads,
        key_heads=key_heads,
        key_size=key_size,
        value_size=size,
        in_turns=bool(raw.get("linear_heads_in_turns")),  # as GGUF files order them
    )
    rope = rope_config(raw)
    attends = [kind == "full_attention" for kind in types]
    return decoder_config(
        raw,
        experts=experts,
        ropes=[rope if each else None for each in attends],
        states=[None if each else state for each in attends],
    )


def build(net: Decoder, prefix: str = "model", project: Projections | None = None) -> ir.Value:
    """Write the decoder and return its logits.

    Args:
        net: the graph to write into.
        prefix: name of the decoder's module in the checkpoint.
        project: writes the projections of linear attention; by default from a weight for each.
    """
    net.checkpoint.ignore("mtp")  # heads that predict further tokens
    x = layers.embedding(net, f"{prefix}.embed_tokens")
    for layer in range(net.config.num_layers):
        with net.scope(f"{prefix}.layers.{layer}"):
            x = decoder_layer(net, layer, x, project or projections)
    return layers.lm_head(net, norm(net, f"{prefix}.norm", x), embedding_name=f"{prefix}.embed_tokens")


def decoder_layer(net: Decoder, layer: int, x: ir.Value, project: Projections) -> ir.Value:
    """Write a layer with attention or a state in the current scope."""
    y = norm(net, "input_layernorm", x)
    if net.config.state(layer) is None:
        y = attention(net, layer, y)
    else:
        y = linear_attention(net, layer, y, project)
    x = net.op("Add", x, y)
    return net.op("Add", x, mlp(net, layer, norm(net, "post_attention_layernorm", x)))


def draft_head(net: Decoder, prefix: str = "model") -> ir.Value:
    """Write the head that predicts the token behind the next one, and return its logits."""
    return write_draft_head(
        net,
        MTP,
        norm=norm,
        layer=lambda net, layer, x: decoder_layer(net, layer, x, projections),
        embedding_name=f"{prefix}.embed_tokens",
    )


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention with norms of heads, times the sigmoid of a gate for each output."""
    c = net.config
    with net.scope("self_attn"):
        stored = (2 * c.q_size, c.hidden_size)
        q, gate = (
            layers.selected_linear(
                net, "q_proj", name, x, stored, _half_of_heads(c.num_heads, half), bias=c.attention_bias
            )
            for half, name in enumerate(("q_proj", "q_gate_proj"))
        )
        k = layers.linear(net, "k_proj", x, c.hidden_size, c.kv_size, bias=c.attention_bias)
        v = layers.linear(net, "v_proj", x, c.hidden_size, c.kv_size, bias=c.attention_bias)
        q = layers.head_norm(net, "q_norm", q, c.num_heads, view=one_plus)
        k = layers.head_norm(net, "k_norm", k, c.num_kv_heads, view=one_plus)
        out = net.op("Mul", layers.attention(net, layer, q, k, v), net.op("Sigmoid", gate))
        return layers.linear(net, "o_proj", out, c.q_size, c.hidden_size, bias=c.attention_bias)


@dataclass(frozen=True, slots=True)
class Projected:
    """The projections of linear attention, all of [batch, sequence, ...].

    Args:
        mixed: queries, keys and values, [..., channels], the input of the convolution.
        gate: of the outputs, [..., heads * value size].
        beta: how much of an error is learned, [..., heads], before the sigmoid.
        rate: of decay, [..., heads], before its bias.
    """

    mixed: ir.Value
    gate: ir.Value
    beta: ir.Value
    rate: ir.Value


Projections = Callable[[Decoder, ir.Value, StateConfig], Projected]


def projections(net: Decoder, x: ir.Value, state: StateConfig) -> Projected:
    """Write the projections of linear attention from a weight for each."""
    hidden, values = net.config.hidden_size, state.heads * state.value_size
    sizes = {"qkv": state.channels, "z": values, "b": state.heads, "a": state.heads}
    return Projected(*(layers.linear(net, f"in_proj_{name}", x, hidden, n) for name, n in sizes.items()))


def linear_attention(net: Decoder, layer: int, x: ir.Value, project: Projections) -> ir.Value:
    """A short convolution over queries, keys and values, the gated delta rule, and a norm times a gate."""
    state = net.config.state(layer)
    assert state is not None  # noqa: S101 -- ``build`` has checked
    keys, values = state.key_heads * state.key_size, state.heads * state.value_size
    with net.scope("linear_attn"):
        parts = project(net, net.without_padding(x), state)
        mixed = net.op("Transpose", parts.mixed, perm=[0, 2, 1])
        mixed = short_convolution(net, layer, state, "conv1d", mixed, silu=True)
        mixed = net.op("Transpose", mixed, perm=[0, 2, 1])
        q, k, v = net.ops("Split", mixed, net.ints(keys, keys, values), num_outputs=3, axis=-1)
        beta = net.op("Sigmoid", parts.beta)
        rate = net.op("Softplus", net.op("Add", parts.rate, net.weight("dt_bias", state.heads)))
        decay = net.op("Mul", rate, net.weight("A_log", state.heads, view=negative_power, new_name="A"))
        out = delta_attention(net, layer, state, q, k, v, decay, beta)
        out = layers.head_norm(net, "norm", out, state.heads, size=state.value_size)
        out = net.op("Mul", out, net.op("Mul", parts.gate, net.op("Sigmoid", parts.gate)))
        return layers.linear(net, "out_proj", out, values, net.config.hidden_size)


def _half_of_heads(heads: int, half: int) -> View:
    """Return a view of one half of the rows of each head."""

    def view(array: Array) -> Array:
        by_head = array.reshape(heads, 2, -1, *array.shape[1:])
        return by_head[:, half].reshape(-1, *array.shape[1:])

    return view
