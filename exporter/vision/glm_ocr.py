"""``vision.onnx`` of GLM-OCR: a tower with a 2-D rope and norms of heads, a convolution that joins squares.

Source: transformers 5.24, models/glm_ocr.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ...contract import GROUP_ROWS, GROUPS, IMAGE_STATES
from ...errors import UnsupportedModelError
from ..config import RawConfig, integer, mapping, number, with_defaults
from ..encoders.tower import Groups, Tower, tower_config
from ..image_processor import CLIP_MEAN, CLIP_STD, check_processor, levels, token_text
from ..weights import Array, Checkpoint
from .qwen2_vl import Processor as Processor

_VISION: RawConfig = {
    "depth": 24,
    "hidden_size": 1024,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "intermediate_size": 4096,
    "out_hidden_size": 1536,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
}
_IMAGE_TOKEN_ID = 59_280
_LEAST, _MOST = 112 * 112, 28 * 28 * 15_000  # pixels of all frames of a patch
_MERGER_EPSILON = 1e-5


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``.

    Its limits are of the pixels of all frames of a patch, those of the record of one.
    """
    check_processor(content, ("Glm4vImageProcessor", "Glm46VImageProcessor"))
    vision, size = _vision(raw), content.get("size") or {}
    if not isinstance(size, dict) or size.keys() - {"shortest_edge", "longest_edge"}:
        raise UnsupportedModelError(
            f"'size' {size!r} is not supported; supported: 'shortest_edge' and 'longest_edge' in pixels"
        )
    frames = int(content.get("temporal_patch_size", 2))
    limits = [int(size.get("shortest_edge", _LEAST)), int(size.get("longest_edge", _MOST))]
    if frames < 1 or any(limit % frames for limit in limits):
        raise UnsupportedModelError(f"'size' {size!r} must hold multiples of {frames} frames")
    token = integer(raw, "image_token_id", _IMAGE_TOKEN_ID)
    processor = Processor(
        family="glm_ocr",
        min_pixels=limits[0] // frames,
        max_pixels=limits[1] // frames,
        frames=frames,
        patch=int(content.get("patch_size", 14)),
        merge=int(content.get("merge_size", 2)),
        rotary=integer(vision, "hidden_size") // max(1, integer(vision, "num_heads")),
        theta=number(mapping(vision, "rope_parameters"), "rope_theta", 10_000.0),
        image_token_id=token,
        texts={"image": token_text(folder, token)},
        **levels(content, 3, CLIP_MEAN, CLIP_STD),
    )
    wanted = [integer(vision, key) for key in ("patch_size", "spatial_merge_size", "temporal_patch_size")]
    if [processor.patch, processor.merge, processor.frames] != wanted:
        raise ValueError(f"its patches are not those of the tower: {wanted}")
    return processor


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph, with lazily read weights; see ``encoders/tower.py``.

    Raises:
        CheckpointError: the configuration or a weight is damaged or missing.
        UnsupportedModelError: the activation is not supported.
    """
    vision = _vision(raw)
    config = tower_config(
        raw,
        vision,
        layers="depth",
        heads="num_heads",
        norm_eps=number(vision, "rms_norm_eps"),
        attention_bias=bool(vision["attention_bias"]),
    )
    patch = integer(vision, "patch_size")
    net = Tower(config, checkpoint, (3, integer(vision, "temporal_patch_size"), patch, patch))
    groups = net.groups(GROUPS, GROUP_ROWS)
    with net.scope("model.visual"):
        x = net.patch_embedding("patch_embed.proj")
        for layer in range(config.num_layers):
            with net.scope(f"blocks.{layer}"):
                x = net.op("Add", x, _attention(net, net.rms_norm("norm1", x), groups))
                normed = net.rms_norm("norm2", x)
                with net.scope("mlp"):
                    sizes = (config.hidden_size, config.intermediate_size)
                    x = net.op("Add", x, _gated(net, normed, sizes, bias=config.attention_bias))
        states = _merger(net, net.rms_norm("post_layernorm", x), vision)
    width = integer(vision, "out_hidden_size")
    net.output(states, IMAGE_STATES, ir.DataType.FLOAT, ("tokens", width))
    return net.model()


def _vision(raw: RawConfig) -> RawConfig:
    """Return the tower's part of config.json, complete."""
    return with_defaults(mapping(raw, "vision_config"), _VISION)


def _attention(net: Tower, x: ir.Value, groups: Groups) -> ir.Value:
    """Write attention with norms of the heads of queries and keys, and a 2-D rope."""
    c, size = net.config, net.config.hidden_size
    with net.scope("attn"):
        q, k, v = net.split_linear("qkv", ("q", "k", "v"), x, size, size, bias=c.attention_bias)
        q, k = (_turned(net, name, y) for name, y in (("q_norm", q), ("k_norm", k)))
        attended = net.attention(q, k, v, groups)
        return net.linear("proj", attended, size, size, bias=c.attention_bias)


def _turned(net: Tower, name: str, x: ir.Value) -> ir.Value:
    """Write the norm of each head of x [patches, heads * head_dim], and rotate it."""
    c = net.config
    normed = net.rms_norm(name, net.op("Reshape", x, net.ints(0, c.num_heads, c.head_dim)), c.head_dim)
    return net.rotate(net.op("Reshape", normed, net.ints(0, c.hidden_size)))


def _gated(net: Tower, x: ir.Value, sizes: tuple[int, int], *, bias: bool) -> ir.Value:
    """Write down(act(gate(x)) * up(x)); ``sizes`` are those of x and of what is inside."""
    gate = net.activation(net.linear("gate_proj", x, *sizes, bias=bias))
    inside = net.op("Mul", gate, net.linear("up_proj", x, *sizes, bias=bias))
    return net.linear("down_proj", inside, *reversed(sizes), bias=bias)


def _merger(net: Tower, x: ir.Value, vision: RawConfig) -> ir.Value:
    """Write the merger [tokens, width]: a convolution whose stride is its kernel, and a gated layer."""
    size, width, edge = (
        net.config.hidden_size,
        integer(vision, "out_hidden_size"),
        integer(vision, "spatial_merge_size"),
    )

    def view(array: Array) -> Array:
        return np.ascontiguousarray(array.transpose(2, 3, 1, 0).reshape(edge * edge * size, width))

    with net.scope("downsample"):
        stored = net.checkpoint.tensor(net.qualified("weight"), (width, size, edge, edge), view=view)
        x = net.op("MatMul", net.merged(x, edge * edge), net.initializer(stored))
        x = net.op("Add", x, net.weight("bias", width))
    with net.scope("merger"):
        x = net.linear("proj", x, width, width, bias=False)
        with net.scope("post_projection_norm"):
            weights = [net.weight(name, width) for name in ("weight", "bias")]
            x = net.op("LayerNormalization", x, *weights, axis=-1, epsilon=_MERGER_EPSILON)
        inner = width * integer(vision, "in_channels")
        return _gated(net, net.activation(x, "gelu"), (width, inner), bias=False)
