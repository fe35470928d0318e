"""``vision.onnx`` of PaddleOCR-VL: a SigLIP tower with a 2-D rope for pictures of any size, and two layers.

Its table of positions is interpolated. Source: https://arxiv.org/abs/2510.14528.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...contract import GROUP_ROWS, GROUPS, IMAGE_STATES, TABLE_ROWS, TABLE_WEIGHTS
from ...errors import UnsupportedModelError
from ..config import RawConfig, integer, mapping, number, with_defaults
from ..encoders.tower import Tower, tower_config
from ..image_processor import CLIP_MEAN, CLIP_STD, check_processor, levels, token_text
from ..models import paddleocr_vl
from ..weights import Checkpoint
from .idefics3 import siglip_layer
from .qwen2_vl import Processor as Processor

_VISION: RawConfig = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "spatial_merge_size": 2,
}
_IMAGE_TOKEN_ID = 100_295
_LEAST, _MOST = 384 * 384, 1536 * 1536  # pixels
_TAPS = 4
_PROJECTOR_EPSILON = 1e-5


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    check_processor(content, ("PaddleOCRVLImageProcessor",))
    vision, size = _vision(raw), content.get("size") or {}
    known = {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}
    if not isinstance(size, dict) or size.keys() - known:
        raise UnsupportedModelError(
            f"'size' {size!r} is not supported; supported: 'shortest_edge' and 'longest_edge' in pixels"
        )
    token = integer(raw, "image_token_id", _IMAGE_TOKEN_ID)
    heads = max(1, integer(vision, "num_attention_heads"))
    processor = Processor(
        family="paddleocr_vl",
        min_pixels=int(content.get("min_pixels", size.get("shortest_edge", _LEAST))),
        max_pixels=int(content.get("max_pixels", size.get("longest_edge", _MOST))),
        frames=int(content.get("temporal_patch_size", 1)),
        patch=int(content.get("patch_size", 14)),
        merge=int(content.get("merge_size", 2)),
        rotary=integer(vision, "hidden_size") // heads,
        theta=number(mapping(vision, "rope_parameters"), "rope_theta", 10_000.0),
        positions=integer(vision, "image_size") // max(1, integer(vision, "patch_size")),
        image_token_id=token,
        texts={"image": token_text(folder, token)},
        **levels(content, 3, CLIP_MEAN, CLIP_STD),
    )
    wanted = [integer(vision, "patch_size"), integer(vision, "spatial_merge_size"), 1]
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
    config = tower_config(raw, vision)
    patch, size = integer(vision, "patch_size"), config.hidden_size
    # The names of published checkpoints, and those of transformers 5.
    old = checkpoint.has_prefix("visual.")
    tower, projector = ("visual", "mlp_AR") if old else ("model.visual", "model.projector")
    checkpoint.ignore(
        f"{tower}.vision_model.head.", f"{tower}.vision_model.embeddings.packing_position_embedding."
    )
    net = Tower(config, checkpoint, (3, patch, patch))
    groups = net.groups(GROUPS, GROUP_ROWS)
    with net.scope(f"{tower}.vision_model"):
        with net.scope("embeddings"):
            x = net.op("Add", net.patch_embedding("patch_embedding"), _positions(net, vision))
        for layer in range(config.num_layers):
            with net.scope(f"encoder.layers.{layer}"):
                x = siglip_layer(net, x, groups, rotates=True)
        x = net.layer_norm("post_layernorm", x)
    text = {**raw, **(raw.get("text_config") or {})}
    width = integer(with_defaults(text, paddleocr_vl.DEFAULTS), "hidden_size")
    k = integer(vision, "spatial_merge_size") ** 2
    with net.scope(projector):
        with net.scope("pre_norm"):
            weights = [net.weight(name, size) for name in ("weight", "bias")]
            x = net.op("LayerNormalization", x, *weights, axis=-1, epsilon=_PROJECTOR_EPSILON)
        x = net.activation(net.linear("linear_1", net.merged(x, k), k * size, k * size), "gelu")
        states = net.linear("linear_2", x, k * size, width)
    net.output(states, IMAGE_STATES, ir.DataType.FLOAT, ("tokens", width))
    return net.model()


def _vision(raw: RawConfig) -> RawConfig:
    """Return the tower's part of config.json, complete."""
    return with_defaults(mapping(raw, "vision_config"), _VISION)


def _positions(net: Tower, vision: RawConfig) -> ir.Value:
    """Interpolate the table of positions, [patches, hidden]; entries and weights are inputs."""
    side = integer(vision, "image_size") // integer(vision, "patch_size")
    rows = net.input(TABLE_ROWS, ir.DataType.INT64, ("patches", _TAPS))
    weights = net.input(TABLE_WEIGHTS, ir.DataType.FLOAT, ("patches", _TAPS))
    entries = net.op("Gather", net.table("position_embedding", side * side), rows, axis=0)
    weighted = net.op("Mul", entries, net.op("Unsqueeze", weights, net.ints(2)))
    return net.op("ReduceSum", weighted, net.ints(1), keepdims=0)
