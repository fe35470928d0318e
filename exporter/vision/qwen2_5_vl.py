"""``vision.onnx`` of Qwen2.5-VL: the tower of Qwen2-VL with RMSNorm, SwiGLU, and windows in most layers.

Source: https://arxiv.org/abs/2502.13923.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...contract import GROUP_ROWS, GROUPS, IMAGE_STATES, WINDOW_ROWS, WINDOWS
from ...errors import CheckpointError
from ..config import RawConfig, integer, mapping, number
from ..encoders.tower import Tower, tower_config
from ..weights import Checkpoint
from . import qwen2_vl
from .qwen2_vl import Processor as Processor

_EPSILON = 1e-6
_TOWER_SIZES: RawConfig = {  # defaults of transformers
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "depth": 32,
    "num_heads": 16,
    "hidden_act": "silu",
}


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    vision = mapping(raw, "vision_config")
    side = integer(vision, "window_size", 112) // max(1, qwen2_vl.patch_size(vision))
    heads = max(1, integer(vision, "num_heads", 16))
    processor = qwen2_vl.processor_of(
        content,
        folder,
        raw,
        head_dim=integer(vision, "hidden_size", 3584) // heads,
        window=side // max(1, integer(vision, "spatial_merge_size", 2)),
    )
    return qwen2_vl.with_videos(processor, folder, raw, float(number(vision, "tokens_per_second", 4)))


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph, with lazily read weights; see ``encoders/tower.py``.

    Raises:
        CheckpointError: the configuration or a weight is damaged or missing.
        UnsupportedModelError: the activation is not supported.
    """
    vision = mapping(raw, "vision_config")
    config = tower_config(
        raw, {**_TOWER_SIZES, **vision}, layers="depth", heads="num_heads", norm_eps=_EPSILON
    )
    whole = vision.get("fullatt_block_indexes", [7, 15, 23, 31])
    if not isinstance(whole, list) or not all(type(layer) is int for layer in whole):
        raise CheckpointError(f"config.json: 'fullatt_block_indexes' must hold layers, found {whole!r}")
    patch = qwen2_vl.patch_size(vision)
    net = Tower(config, checkpoint, (3, qwen2_vl.frames(vision), patch, patch))
    groups, windows = net.groups(GROUPS, GROUP_ROWS), net.groups(WINDOWS, WINDOW_ROWS)
    width = qwen2_vl.states_width(vision, "out_hidden_size")
    with net.scope(qwen2_vl.vision_prefix(checkpoint)):
        x = net.patch_embedding("patch_embed.proj", bias=False)
        for layer in range(config.num_layers):
            with net.scope(f"blocks.{layer}"):
                normed, near = net.rms_norm("norm1", x), groups if layer in whole else windows
                x = net.op("Add", x, qwen2_vl.attention(net, normed, near))
                x = net.op("Add", x, _mlp(net, net.rms_norm("norm2", x)))
        with net.scope("merger"):
            states = qwen2_vl.merger(net, net.rms_norm("ln_q", x), vision, width)
    net.output(states, IMAGE_STATES, ir.DataType.FLOAT, ("tokens", width))
    return net.model()


def _mlp(net: Tower, x: ir.Value) -> ir.Value:
    size, inner = net.config.hidden_size, net.config.intermediate_size
    with net.scope("mlp"):
        gate = net.activation(net.linear("gate_proj", x, size, inner))
        inside = net.op("Mul", gate, net.linear("up_proj", x, size, inner))
        return net.linear("down_proj", inside, inner, size)
