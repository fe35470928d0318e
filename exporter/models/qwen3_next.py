"""Qwen 3 Next: the layers of Qwen 3.5 with experts, whose projections are stored by head of keys."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, StateConfig, with_defaults
from ..decoder import Decoder
from ..layers.projections import View
from ..weights import Array
from . import qwen3_5_moe_text, qwen3_5_text
from .qwen2_moe import experts
from .qwen3_5_text import Projected, draft_head, hybrid_config

__all__ = ["build", "config", "draft_head"]

DEFAULTS: RawConfig = {
    **qwen3_5_moe_text.DEFAULTS,
    "vocab_size": 151_936,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    raw = with_defaults(raw, DEFAULTS)
    return hybrid_config(raw, experts(raw))


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return qwen3_5_text.build(net, project=projections)


def projections(net: Decoder, x: ir.Value, state: StateConfig) -> Projected:
    """Write the projections of linear attention from two weights, whose rows are grouped by head of keys."""
    hidden, repeats = net.config.hidden_size, state.heads // state.key_heads
    keys, values = state.key_size, repeats * state.value_size
    ends = np.cumsum([0, keys, keys, values, values]).tolist()
    parts = [slice(*pair) for pair in pairwise(ends)]
    whole = (state.key_heads * ends[-1], hidden)
    mixed = _of_groups(state.key_heads, *parts[:3])
    both = (2 * state.heads, hidden)
    return Projected(
        mixed=layers.selected_linear(net, "in_proj_qkvz", "in_proj_qkv", x, whole, mixed),
        gate=layers.selected_linear(
            net, "in_proj_qkvz", "in_proj_z", x, whole, _of_groups(state.key_heads, parts[3])
        ),
        beta=layers.selected_linear(
            net, "in_proj_ba", "in_proj_b", x, both, _of_groups(state.key_heads, slice(repeats))
        ),
        rate=layers.selected_linear(
            net, "in_proj_ba", "in_proj_a", x, both, _of_groups(state.key_heads, slice(repeats, None))
        ),
    )


def _of_groups(groups: int, *parts: slice) -> View:
    """Return a view of some rows of each group: those of the first part of all groups, then of the next."""

    def view(array: Array) -> Array:
        by_group = array.reshape(groups, -1, *array.shape[1:])
        return np.concatenate([by_group[:, part].reshape(-1, *array.shape[1:]) for part in parts])

    return view
