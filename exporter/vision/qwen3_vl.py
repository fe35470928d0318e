"""``vision.onnx`` of Qwen3-VL: a learned table of positions beside the rope, and states of inner layers.

Sources: Qwen3-VL, https://arxiv.org/abs/2511.21631; DeepStack, https://arxiv.org/abs/2406.04334.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...contract import GROUP_ROWS, GROUPS, IMAGE_STATES, TABLE_ROWS, TABLE_WEIGHTS
from ...errors import CheckpointError
from ..config import RawConfig, integer, mapping
from ..encoders.tower import Tower, tower_config
from ..image_processor import token_text, video_settings
from ..weights import Checkpoint
from . import qwen2_vl
from .qwen2_vl import Processor as Processor

_EPSILON = 1e-6
_TAPS = 4  # entries of the table that a position is interpolated from
_TOWER_SIZES: RawConfig = {  # defaults of transformers
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "depth": 27,
    "num_heads": 16,
    "hidden_act": "gelu_pytorch_tanh",
}


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    vision = mapping(raw, "vision_config")
    heads = max(1, integer(vision, "num_heads", 16))
    processor = qwen2_vl.processor_of(
        content,
        folder,
        {**raw, "vision_config": {"patch_size": 16, **vision}},
        head_dim=integer(vision, "hidden_size", 1152) // heads,
        positions=math.isqrt(integer(vision, "num_position_embeddings", 2304)),
    )
    around = {"start": ("vision_start_token_id", 151_652), "end": ("vision_end_token_id", 151_653)}
    texts = {name: token_text(folder, integer(raw, key, token)) for name, (key, token) in around.items()}
    if video_settings(folder).get("cap_pixels_per_frame"):
        return processor  # frames of other sizes than those that ``prepare_video`` makes
    # The range of pixels is that of all frames of a video together.
    seeing = qwen2_vl.with_videos(processor, folder, raw, pixels=(128 * 32 * 32, 32 * 32 * 768))
    return replace(seeing, family="qwen3_vl", texts={**seeing.texts, **texts})


def deep_layers(raw: RawConfig) -> list[int]:
    """Return the layers of the tower whose states are added behind the first layers of the decoder.

    Raises:
        CheckpointError: they are not layers of the tower.
    """
    vision = mapping(raw, "vision_config")
    layers = vision.get("deepstack_visual_indexes", [8, 16, 24])
    depth = integer(vision, "depth", 27)
    if not isinstance(layers, list) or not all(type(n) is int and 0 <= n < depth for n in layers):
        raise CheckpointError(
            f"config.json: 'deepstack_visual_indexes' must hold layers below {depth}, found {layers!r}"
        )
    return layers


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph, with lazily read weights; see ``encoders/tower.py``.

    Its output has the states of the last layer, then those of each of ``deep_layers``, beside each other.

    Raises:
        CheckpointError: the configuration or a weight is damaged or missing.
        UnsupportedModelError: the activation is not supported.
    """
    vision = mapping(raw, "vision_config")
    config = tower_config(
        raw, {**_TOWER_SIZES, **vision}, layers="depth", heads="num_heads", norm_eps=_EPSILON
    )
    size, inner, patch = config.hidden_size, config.intermediate_size, qwen2_vl.patch_size(vision, 16)
    net = Tower(config, checkpoint, (3, qwen2_vl.frames(vision), patch, patch))
    groups = net.groups(GROUPS, GROUP_ROWS)
    deep, parts = deep_layers(raw), list[ir.Value]()
    with net.scope(qwen2_vl.vision_prefix(checkpoint)):
        x = net.op("Add", net.patch_embedding("patch_embed.proj"), _positions(net, vision))
        for layer in range(config.num_layers):
            with net.scope(f"blocks.{layer}"):
                x = net.op("Add", x, qwen2_vl.attention(net, net.layer_norm("norm1", x), groups))
                inside = net.activation(net.linear("mlp.linear_fc1", net.layer_norm("norm2", x), size, inner))
                x = net.op("Add", x, net.linear("mlp.linear_fc2", inside, inner, size))
            if layer in deep:
                with net.scope(f"deepstack_merger_list.{deep.index(layer)}"):
                    parts.append(_merger(net, x, vision, norm_first=False))
        with net.scope("merger"):
            parts.insert(0, _merger(net, x, vision, norm_first=True))
    states = net.op("Concat", *parts, axis=1) if deep else parts[0]
    width = len(parts) * qwen2_vl.states_width(vision, "out_hidden_size")
    net.output(states, IMAGE_STATES, ir.DataType.FLOAT, ("tokens", width))
    return net.model()


def _positions(net: Tower, vision: RawConfig) -> ir.Value:
    """Interpolate the table of positions, [patches, hidden]; entries and weights are inputs."""
    rows = net.input(TABLE_ROWS, ir.DataType.INT64, ("patches", _TAPS))
    weights = net.input(TABLE_WEIGHTS, ir.DataType.FLOAT, ("patches", _TAPS))
    table = net.table("pos_embed", integer(vision, "num_position_embeddings", 2304))
    entries = net.op("Gather", table, rows, axis=0)
    weighted = net.op("Mul", entries, net.op("Unsqueeze", weights, net.ints(-1)))
    return net.op("ReduceSum", weighted, net.ints(1), keepdims=0)


def _merger(net: Tower, x: ir.Value, vision: RawConfig, *, norm_first: bool) -> ir.Value:
    """Write a merger; its norm is over patches, or over the squares of patches that join."""
    k = integer(vision, "spatial_merge_size", 2) ** 2
    inner = k * net.config.hidden_size
    if norm_first:
        joined = net.merged(net.layer_norm("norm", x), k)
    else:
        joined = net.layer_norm("norm", net.merged(x, k), inner)
    joined = net.activation(net.linear("linear_fc1", joined, inner, inner), "gelu")
    return net.linear("linear_fc2", joined, inner, qwen2_vl.states_width(vision, "out_hidden_size"))
