"""Nemotron-H and Nemotron 3: each layer is one of Mamba-2, attention, a feed-forward layer or experts."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from ...errors import CheckpointError, UnsupportedModelError
from .. import layers
from ..config import DecoderConfig, ExpertsConfig, RawConfig, decoder_config, integer, number, with_defaults
from ..decoder import Decoder
from ..layers.experts import StackedForm, sparse_mlp
from ..layers.mamba import mamba, mamba_config
from .deepseek_v3 import route

DEFAULTS: RawConfig = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "intermediate_size": 21_504,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "time_step_min": 0.001,
    "use_conv_bias": True,
    "use_bias": False,
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "layer_norm_epsilon": 1e-5,
}
_MAMBA, _ATTENTION, _MLP, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "-": _MLP, "E": _EXPERTS}
_NAMES = {"mamba": _MAMBA, "attention": _ATTENTION, **{kind: kind for kind in _LETTERS.values()}}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. A layer's kind is in ``layers_block_type``, or is a letter of a pattern."""
    raw = with_defaults(raw, DEFAULTS)
    kinds = _kinds(raw)
    experts = ExpertsConfig(
        scope="mixer",
        count=integer(raw, "n_routed_experts"),
        per_token=integer(raw, "num_experts_per_tok"),
        width=integer(raw, "moe_intermediate_size"),
        normalize=bool(raw["norm_topk_prob"]),
        names=("", "up_proj", "down_proj"),
        shared=integer(raw, "moe_shared_expert_intermediate_size"),
        groups=integer(raw, "n_group"),
        groups_per_token=integer(raw, "topk_group"),
        scale=number(raw, "routed_scaling_factor"),
        latent=integer(raw, "moe_latent_size") if raw.get("moe_latent_size") else 0,
    )
    state = dataclasses.replace(
        mamba_config(
            {
                "hidden_size": raw["hidden_size"],
                "mamba_hidden_act": raw.get("mamba_hidden_act", "silu"),
                "mamba_n_heads": raw["mamba_num_heads"],
                "mamba_d_head": raw["mamba_head_dim"],
                "mamba_n_groups": raw["n_groups"],
                "mamba_d_state": raw["ssm_state_size"],
                "mamba_d_conv": raw["conv_kernel"],
                "mamba_conv_bias": raw["use_conv_bias"],
                "mamba_proj_bias": raw["use_bias"],
            }
        ),
        slowest=number(raw, "time_step_min"),
    )
    return dataclasses.replace(
        decoder_config(
            {
                **raw,
                "num_hidden_layers": len(kinds),
                "rms_norm_eps": raw["layer_norm_epsilon"],
                "hidden_act": raw["mlp_hidden_act"],
                "attention_bias": False,
                "tie_word_embeddings": False,  # transformers ignores the key: files always have a head
            },
            experts=[experts if kind == _EXPERTS else None for kind in kinds],
            ropes=[None] * len(kinds),
            states=[state if kind == _MAMBA else None for kind in kinds],
        ),
        attends=tuple(kind == _ATTENTION for kind in kinds),
    )


def _kinds(raw: RawConfig) -> list[str]:
    stated = raw.get("layers_block_type") or raw.get("layer_types")
    names, source = _NAMES, "layers_block_type"
    if stated is None:
        stated, names, source = raw.get("hybrid_override_pattern"), _LETTERS, "hybrid_override_pattern"
    if not stated:
        raise CheckpointError(
            "config.json must state the kinds of layers, in 'layers_block_type' or 'hybrid_override_pattern'"
        )
    unknown = sorted(set(stated) - set(names))
    if unknown:
        raise UnsupportedModelError(
            f"{source} has '{unknown[0]}', which is not supported; supported: {', '.join(names)}"
        )
    return [names[kind] for kind in stated]


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    prefix = next(
        (name for name in ("backbone", "model") if f"{name}.norm_f.weight" in net.checkpoint), "model"
    )
    net.checkpoint.ignore("mtp")  # layers that predict further tokens
    x = layers.embedding(net, f"{prefix}.embeddings")
    for layer in range(net.config.num_layers):
        with net.scope(f"{prefix}.layers.{layer}"):
            y = layers.rms_norm(net, "norm", x)
            x = net.op("Add", x, mixer(net, layer, y))
    x = layers.rms_norm(net, f"{prefix}.norm_f", x)
    return layers.lm_head(net, x, embedding_name=f"{prefix}.embeddings")


def mixer(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the layer's part, of whatever kind."""
    c, experts = net.config, net.config.experts[layer]
    if experts is not None:
        form = StackedForm()
        return sparse_mlp(net, x, experts, route=route, expert=expert, stacked=form, shared=shared_expert)
    with net.scope("mixer"):
        if c.state(layer) is not None:
            return mamba(net, layer, x)
        if not c.has_attention(layer):
            return plain_mlp(net, x, c.intermediate_size)
        q, k, v = layers.qkv(net, x, bias=False)
        return layers.linear(net, "o_proj", layers.attention(net, layer, q, k, v), c.q_size, c.hidden_size)


def plain_mlp(net: Decoder, x: ir.Value, width: int) -> ir.Value:
    """Write down(act(up(x))) with ``width`` inner values."""
    hidden, bias = net.config.hidden_size, net.config.mlp_bias
    x = layers.activation(net, layers.linear(net, "up_proj", x, hidden, width, bias=bias))
    return layers.linear(net, "down_proj", x, width, hidden, bias=bias)


def expert(net: Decoder, x: ir.Value, index: int, experts: ExpertsConfig) -> ir.Value:
    """Write expert ``index`` for x [n, hidden or latent size]; experts have no biases."""
    hidden, width = experts.latent or net.config.hidden_size, experts.width
    with net.scope(f"experts.{index}"):
        x = layers.activation(net, layers.linear(net, "up_proj", x, hidden, width))
        return layers.linear(net, "down_proj", x, width, hidden)


def shared_expert(net: Decoder, x: ir.Value, experts: ExpertsConfig) -> ir.Value:
    """Write the expert of all tokens."""
    with net.scope("shared_experts"):
        return plain_mlp(net, x, experts.shared)
