"""``vision.onnx`` of Idefics3 and SmolVLM: a SigLIP tower, pixel shuffle, and one projection.

Sources: SigLIP https://arxiv.org/abs/2303.15343, Idefics3 https://arxiv.org/abs/2408.12637. The graph has no
logic of shapes: which patches attend to each other, where they are and which of them join into a token are
inputs, computed on the host.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...contract import (
    GROUP_ROWS,
    GROUPS,
    IMAGE_STATES,
    MERGED_PATCHES,
    PATCH_POSITIONS,
    PIXELS,
)
from ...errors import CheckpointError
from ..config import RawConfig, integer, mapping, number
from ..encoders.encoder import EncoderConfig, EncoderLayers
from ..weights import Checkpoint

_TOWER, _PROJECTION = "model.vision_model", "model.connector.modality_projection.proj"


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph, with lazily read weights.

    Its inputs are ``pixels`` float32 [n, channels * patch * patch], ``patch_positions`` int64 [n],
    ``groups`` int64 [groups, longest] of patches that attend to each other, -1 where a group is shorter,
    ``group_rows`` int64 [n], the place of each patch in them, and ``merged_patches`` int64 [tokens, k]. Its
    output is ``image_states`` float32 [tokens, hidden size of the decoder].

    Raises:
        CheckpointError: the configuration or a weight is damaged or missing.
        UnsupportedModelError: the activation is not supported.
    """
    vision = mapping(raw, "vision_config")
    config = _config(raw, vision)
    patch, channels = integer(vision, "patch_size", 32), integer(vision, "num_channels", 3)
    table = (integer(vision, "image_size", 224) // max(1, patch)) ** 2
    k, width = integer(raw, "scale_factor", 2) ** 2, integer(mapping(raw, "text_config"), "hidden_size")
    net = EncoderLayers(config, checkpoint)
    pixels = net.input(PIXELS, ir.DataType.FLOAT, ("patches", channels * patch * patch))
    positions = net.input(PATCH_POSITIONS, ir.DataType.INT64, ("patches",))
    groups = net.input(GROUPS, ir.DataType.INT64, ("groups", "longest"))
    rows = net.input(GROUP_ROWS, ir.DataType.INT64, ("patches",))
    merged = net.input(MERGED_PATCHES, ir.DataType.INT64, ("tokens", k))
    with net.scope(_TOWER):
        x = _embeddings(net, pixels, positions, (channels, patch, table))
        mask, seen = _group_mask(net, groups)
        for layer in range(config.num_layers):
            with net.scope(f"encoder.layers.{layer}"):
                x = _layer(net, x, (seen, mask, rows))
        x = net.layer_norm("post_layernorm", x)
    joined = net.op("Gather", x, merged, axis=0)
    flat = net.op("Reshape", joined, net.ints(-1, k * config.hidden_size))
    states = net.linear(_PROJECTION, flat, k * config.hidden_size, width, bias=False)
    net.output(states, IMAGE_STATES, ir.DataType.FLOAT, ("tokens", width))
    return net.model()


def _config(raw: RawConfig, vision: RawConfig) -> EncoderConfig:
    config = EncoderConfig(
        model_type=f"{raw['model_type']}_vision",
        vocab_size=0,
        hidden_size=integer(vision, "hidden_size", 1152),
        intermediate_size=integer(vision, "intermediate_size", 3072),
        num_layers=integer(vision, "num_hidden_layers", 12),
        num_heads=integer(vision, "num_attention_heads", 16),
        max_tokens=0,
        hidden_act=str(vision.get("hidden_act", "gelu_pytorch_tanh")),
        norm_eps=number(vision, "layer_norm_eps", 1e-6),
    )
    if config.hidden_size % config.num_heads:
        raise CheckpointError(
            f"config.json: hidden_size {config.hidden_size} of 'vision_config' must be a multiple of the "
            f"number of heads {config.num_heads}"
        )
    return config


def _embeddings(
    net: EncoderLayers, pixels: ir.Value, positions: ir.Value, sizes: tuple[int, int, int]
) -> ir.Value:
    """Return the states [n, hidden] of patches: a convolution whose stride is its kernel is a product."""
    (channels, patch, table), hidden = sizes, net.config.hidden_size
    with net.scope("embeddings"):
        with net.scope("patch_embedding"):
            stored = net.checkpoint.tensor(
                net.qualified("weight"),
                (hidden, channels, patch, patch),
                view=lambda array: array.reshape(hidden, -1).T,
            )
            x = net.op("MatMul", pixels, net.initializer(stored))
            x = net.op("Add", x, net.weight("bias", hidden))
        with net.scope("position_embedding"):
            places = net.op("Gather", net.weight("weight", table, hidden), positions, axis=0)
        return net.op("Add", x, places)


def _group_mask(net: EncoderLayers, groups: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return which members of a group exist, [groups, 1, longest, longest], and members without -1."""
    with net.unscoped("groups"):
        zero = net.constant(0, np.int64, "0")
        there = net.op("Unsqueeze", net.op("GreaterOrEqual", groups, zero), net.ints(1, 2))
        count, longest = net.op("Shape", groups, start=0, end=1), net.op("Shape", groups, start=1, end=2)
        # onnxruntime 1.32 does not broadcast one row to all queries.
        mask = net.op("Expand", there, net.op("Concat", count, net.ints(1), longest, longest, axis=0))
        return mask, net.op("Max", groups, zero)


def _layer(net: EncoderLayers, x: ir.Value, where: tuple[ir.Value, ir.Value, ir.Value]) -> ir.Value:
    """Write one layer: x += attention(norm(x)); x += mlp(norm(x)); x is [n, hidden]."""
    c = net.config
    hidden, inner = c.hidden_size, c.intermediate_size
    normed = net.layer_norm("layer_norm1", x)
    with net.scope("self_attn"):
        x = net.op("Add", x, net.linear("out_proj", _attention(net, normed, where), hidden, hidden))
    normed = net.layer_norm("layer_norm2", x)
    with net.scope("mlp"):
        inside = net.activation(net.linear("fc1", normed, hidden, inner))
        return net.op("Add", x, net.linear("fc2", inside, inner, hidden))


def _attention(net: EncoderLayers, x: ir.Value, where: tuple[ir.Value, ir.Value, ir.Value]) -> ir.Value:
    """Attend within each group; x is [n, hidden]."""
    c, (seen, mask, rows) = net.config, where
    q, k, v = (
        net.op("Gather", net.linear(name, x, c.hidden_size, c.hidden_size), seen, axis=0)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    heads = {"q_num_heads": c.num_heads, "kv_num_heads": c.num_heads}
    attended = net.op("Attention", q, k, v, mask, **heads, scale=c.head_dim**-0.5)
    return net.op("Gather", net.op("Reshape", attended, net.ints(-1, c.hidden_size)), rows, axis=0)
