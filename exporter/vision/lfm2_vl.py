"""``vision.onnx`` of LFM2-VL: the tower of SigLIP 2, whose squares of patches are joined, and two layers.

Source: LFM2, https://arxiv.org/abs/2511.23404, section on vision. Patches are [height, width, channels].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...contract import IMAGE_STATES
from ...errors import UnsupportedModelError
from ...records import dataclass
from ..config import RawConfig, integer, read_json
from ..encoders.tower import Tower, tower_config
from ..image_processor import (
    HALF,
    PROCESSOR_FILE,
    ImageProcessor,
    check_processor,
    levels,
    named_tokens,
    token_text,
)
from ..models.lfm2_vl import decoder_part
from ..weights import Checkpoint
from .siglip2 import position_edge, tower_part, tower_states

_MOST_TILES = 256
_PROJECTOR_EPSILON = 1e-5
_TOKENS = {
    "start": ("image_start_token", "<|image_start|>"),
    "end": ("image_end_token", "<|image_end|>"),
    "whole": ("image_thumbnail_token", "<|img_thumbnail|>"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor(ImageProcessor):
    """A picture of its own aspect ratio; one of too many pixels is cut into tiles, which the whole follows.

    Args:
        tile: pixels of an edge of a tile, all of which are square.
        min_tiles: the fewest tiles of a picture that is cut.
        max_tiles: the most; 1 if no picture is cut.
        whole: whether the whole picture follows its tiles.
        min_tokens: the fewest tokens of a picture that is not cut.
        max_tokens: the most.
        tolerance: how many times the pixels of ``max_tokens`` a picture may have that is not cut.
        positions: entries along an edge of the tower's table of positions.
    """

    tile: int
    min_tiles: int
    max_tiles: int
    whole: bool
    min_tokens: int
    max_tokens: int
    tolerance: float
    positions: int

    def at_low_detail(self) -> Processor:
        return replace(self, min_tiles=1, max_tiles=1)

    def check(self) -> None:
        ImageProcessor.check(self)
        self.check_sizes("tile", "min_tokens", "max_tokens", "positions")
        self.check_sizes("min_tiles", "max_tiles", most=_MOST_TILES)
        if self.min_tiles > self.max_tiles or self.min_tokens > self.max_tokens:
            raise ValueError("a least number of tiles or tokens exceeds the most")
        if not self.tolerance > 0:
            raise ValueError(f"'tolerance' must be above 0, found {self.tolerance!r}")
        if self.tile % (self.patch * self.merge):
            raise ValueError(
                f"tiles of {self.tile} pixels do not hold whole tokens of {self.merge} patches of "
                f"{self.patch} pixels along an edge"
            )
        self.check_texts("start", "end", "whole")


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    check_processor(content, ("Lfm2VlImageProcessor",))
    vision, merge = tower_part(raw), integer(raw, "downsample_factor", 2)
    sizes = {"encoder_patch_size": (16, integer(vision, "patch_size")), "downsample_factor": (2, merge)}
    for name, (default, size) in sizes.items():
        if int(content.get(name, default)) != size:
            raise ValueError(f"'{name}' {content.get(name, default)!r} is not that of the tower: {size}")
    path = folder / PROCESSOR_FILE
    if path.is_file() and read_json(path).get("use_image_special_tokens", True) is not True:
        raise UnsupportedModelError("'use_image_special_tokens': false is not supported; supported: true")
    splits = bool(content.get("do_image_splitting", True))
    token = integer(raw, "image_token_id", 396)
    return Processor(
        family="lfm2_vl",
        tile=int(content.get("tile_size", 512)),
        min_tiles=int(content.get("min_tiles", 2)) if splits else 1,
        max_tiles=int(content.get("max_tiles", 10)) if splits else 1,
        whole=bool(content.get("use_thumbnail", True)),
        min_tokens=int(content.get("min_image_tokens", 64)),
        max_tokens=int(content.get("max_image_tokens", 256)),
        tolerance=float(content.get("max_pixels_tolerance", 2.0)),
        positions=position_edge(vision),
        patch=integer(vision, "patch_size"),
        merge=merge,
        image_token_id=token,
        texts={"image": token_text(folder, token), **named_tokens(folder, _TOKENS)},
        **levels(content, 2, HALF, HALF),
    )


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph, with lazily read weights; see ``encoders/tower.py`` and ``siglip2.tower_states``.

    Raises:
        CheckpointError: the configuration or a weight is damaged or missing.
        UnsupportedModelError: an option is not supported.
    """
    if raw.get("vision_feature_layer", -1) != -1:
        raise UnsupportedModelError(
            f"'vision_feature_layer' {raw['vision_feature_layer']!r} is not supported; supported: -1"
        )
    vision, merge = tower_part(raw), integer(raw, "downsample_factor", 2)
    patch, inner = integer(vision, "patch_size"), integer(raw, "projector_hidden_size", 2560)
    width, bias = integer(decoder_part(raw), "hidden_size", 2560), bool(raw.get("projector_bias", True))
    net = Tower(tower_config(raw, vision), checkpoint, (patch, patch, 3))
    joined = net.config.hidden_size * merge**2
    tower = "model.vision_tower"
    # transformers 4 wrote the longer prefix.
    with net.scope(f"{tower}.vision_model" if checkpoint.has_prefix(f"{tower}.vision_model.") else tower):
        x = net.layer_norm("post_layernorm", tower_states(net, position_edge(vision)))
    with net.scope("model.multi_modal_projector"):
        x = net.merged(x, merge**2)
        if raw.get("projector_use_layernorm", True):
            with net.scope("layer_norm"):
                weights = [net.weight(name, joined) for name in ("weight", "bias")]
                x = net.op("LayerNormalization", x, *weights, axis=-1, epsilon=_PROJECTOR_EPSILON)
        x = net.linear("linear_1", x, joined, inner, bias=bias)
        x = net.activation(x, str(raw.get("projector_hidden_act", "gelu")))
        states = net.linear("linear_2", x, inner, width, bias=bias)
    net.output(states, IMAGE_STATES, ir.DataType.FLOAT, ("tokens", width))
    return net.model()
