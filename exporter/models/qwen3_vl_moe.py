"""Qwen3-VL with a mixture of experts: its text decoder, a Qwen 3 MoE, see ``vision/qwen3_vl.py``."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, ExpertsConfig, RawConfig, decoder_config, with_defaults
from ..decoder import Decoder
from ..layers.experts import StackedForm, sparse_mlp, stacked_expert
from . import qwen2_moe, qwen2_vl, qwen3
from .qwen3_vl import SECTIONS, THETA, deep_states

_DEFAULTS: RawConfig = {
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
    "norm_topk_prob": True,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes the decoder."""
    result = qwen2_vl.seeing_config(raw, _config, sections=SECTIONS, interleaved=True, theta=THETA)
    return replace(result, deep_states=deep_states(raw))


def _config(raw: RawConfig) -> DecoderConfig:
    # Whatever the file says, the weights of a token's experts are scaled to sum to 1.
    raw = {**with_defaults(raw, _DEFAULTS), "norm_topk_prob": True}
    return decoder_config(raw, experts=qwen2_moe.experts(raw))


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("visual.", "model.visual.")
    return layers.pre_norm_decoder(
        net, attention=qwen3.attention, mlp=_mlp, prefix=qwen2_vl.text_prefix(net.checkpoint)
    )


def _mlp(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    experts = net.config.experts[layer]
    if experts is None:
        return layers.gated_mlp(net, layer, x)
    return sparse_mlp(net, x, experts, expert=_expert, stacked=StackedForm())


def _expert(net: Decoder, x: ir.Value, index: int, experts: ExpertsConfig) -> ir.Value:
    """Published checkpoints hold the stacks transposed, [experts, in, out]."""
    with net.scope("experts"):
        return stacked_expert(net, x, index, experts, transposed=True)
