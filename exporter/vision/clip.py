"""``vision.onnx`` of CLIP (https://arxiv.org/abs/2103.00020): the vector of a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...contract import IMAGE_STATES
from ...errors import UnsupportedModelError
from ..config import RawConfig, integer, mapping, with_defaults
from ..encoders.pre_norm import CLIP_VECTOR
from ..encoders.tower import Tower, tower_config
from ..image_processor import CLIP_MEAN, CLIP_STD, TileProcessor, check_processor, levels
from ..weights import Checkpoint
from .llava import tower_states

_VISION: RawConfig = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "layer_norm_eps": 1e-5,
    "hidden_act": "quick_gelu",
}

Processor = TileProcessor


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    check_processor(content, ("CLIPImageProcessor", "CLIPFeatureExtractor"))
    if content.get("do_center_crop", True) is not True:
        raise UnsupportedModelError("'do_center_crop': False is not supported; supported: true")
    edge = integer(_vision(raw), "image_size")
    size, crop = content.get("size", 224), content.get("crop_size", 224)
    shortest = {"shortest_edge": edge}
    if size not in (edge, shortest) or crop not in (edge, {"height": edge, "width": edge}):
        raise UnsupportedModelError(
            f"'size' {size!r} and 'crop_size' {crop!r} are not supported; supported: the tower's "
            f"'image_size' {edge}"
        )
    return Processor(
        family="clip",
        tile=edge,
        patch=integer(_vision(raw), "patch_size"),
        merge=1,
        **levels(content, 3, CLIP_MEAN, CLIP_STD),
    )


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph, with lazily read weights; see ``encoders/tower.py``.

    The state of a whole tile is that of a patch of zeros at position 0; its projection is the vector of the
    picture, float32 [pictures, size].

    Raises:
        CheckpointError: the configuration or a weight is damaged or missing.
        UnsupportedModelError: an option is not supported.
    """
    vision = _vision(raw)
    config, patch = tower_config(raw, vision), integer(vision, "patch_size")
    net = Tower(config, checkpoint, (3, patch, patch))
    with net.scope("vision_model"):
        x = net.merged(tower_states(net, vision, class_token=True), 1)
        x = net.layer_norm("post_layernorm", x)
    size = integer(raw, "projection_dim", CLIP_VECTOR)
    states = net.linear("visual_projection", x, config.hidden_size, size, bias=False)
    net.output(states, IMAGE_STATES, ir.DataType.FLOAT, ("tokens", size))
    return net.model()


def _vision(raw: RawConfig) -> RawConfig:
    """Return the tower's part of config.json, complete."""
    return with_defaults(mapping(raw, "vision_config_dict", "vision_config"), _VISION)
