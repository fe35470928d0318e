"""``vision.onnx`` of Gemma 3: a SigLIP tower, the means of squares of patches, a norm and one projection.

Source: https://arxiv.org/abs/2503.19786.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...contract import GROUP_ROWS, GROUPS, IMAGE_STATES, PATCH_POSITIONS
from ...errors import CheckpointError, UnsupportedModelError
from ...records import dataclass
from ..config import RawConfig, integer, mapping, text_config, with_defaults
from ..encoders.tower import Tower, tower_config
from ..image_processor import (
    HALF,
    ImageProcessor,
    check_processor,
    levels,
    named_tokens,
    token_text,
)
from ..models import gemma3_text
from ..weights import Checkpoint
from .idefics3 import siglip_layer

_VISION: RawConfig = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
}
_CROPS = {"min_crop": 256, "max_crops": 4, "crop_ratio": 1.2}  # of transformers' processor
_MOST_CROPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor(ImageProcessor):
    """A picture in one square tile, and beside it in crops if it is long (pan and scan).

    Args:
        tile: pixels of an edge of the tile, to which a picture is resized whatever its aspect ratio.
        crops: whether a long picture is cut into crops too.
        min_crop: the fewest pixels of an edge of a crop; with smaller ones there are none.
        max_crops: the most crops.
        crop_ratio: the ratio of the edges from which on a picture is cut.
    """

    tile: int
    crops: bool
    min_crop: int
    max_crops: int
    crop_ratio: float

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return (self.tile // self.patch // self.merge) ** 2

    def at_low_detail(self) -> Processor:
        return replace(self, crops=False)

    def check(self) -> None:
        ImageProcessor.check(self)
        self.check_sizes("tile", "min_crop")
        self.check_sizes("max_crops", most=_MOST_CROPS)
        if type(self.crops) is not bool or not self.crop_ratio >= 1:
            raise ValueError("'crops' must be true or false, and 'crop_ratio' at least 1")
        if self.tile % (self.patch * self.merge):
            raise ValueError(
                f"tiles of {self.tile} pixels do not hold whole tokens of {self.merge} patches of "
                f"{self.patch} pixels along an edge"
            )
        self.check_texts("place", "end")


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``.

    ``do_pan_and_scan`` of preprocessor_config.json counts; transformers' processor of texts and pictures
    takes that of the caller only.
    """
    check_processor(content, ("Gemma3ImageProcessor",))
    vision = _vision(raw)
    tile = integer(vision, "image_size")
    size = content.get("size", {"height": 224, "width": 224})
    if size != {"height": tile, "width": tile}:
        raise UnsupportedModelError(
            f"'size' {size!r} is not supported; supported: the tower's {tile} x {tile}"
        )
    token = integer(raw, "image_token_id", integer(raw, "image_token_index", 262_144))
    names = {"place": ("boi_token", "<start_of_image>"), "end": ("eoi_token", "<end_of_image>")}
    return Processor(
        family="gemma3",
        tile=tile,
        crops=bool(content.get("do_pan_and_scan", False)),
        min_crop=int(content.get("pan_and_scan_min_crop_size", _CROPS["min_crop"])),
        max_crops=int(content.get("pan_and_scan_max_num_crops", _CROPS["max_crops"])),
        crop_ratio=float(content.get("pan_and_scan_min_ratio_to_activate", _CROPS["crop_ratio"])),
        patch=integer(vision, "patch_size"),
        merge=_merge(raw, vision),
        image_token_id=token,
        texts={"image": token_text(folder, token), **named_tokens(folder, names)},
        **levels(content, 2, HALF, HALF),
    )


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph, with lazily read weights; see ``encoders/tower.py``.

    Raises:
        CheckpointError: the configuration or a weight is damaged or missing.
        UnsupportedModelError: an option is not supported.
    """
    vision = _vision(raw)
    config = tower_config(raw, vision)
    patch, hidden, k = integer(vision, "patch_size"), config.hidden_size, _merge(raw, vision) ** 2
    # transformers 4 wrote the first prefix, transformers 5 writes the second.
    first = "" if checkpoint.has_prefix("vision_tower.") else "model."
    within = f"{first}vision_tower.vision_model"
    net = Tower(config, checkpoint, (3, patch, patch))
    groups = net.groups(GROUPS, GROUP_ROWS)
    positions = net.input(PATCH_POSITIONS, ir.DataType.INT64, ("patches",))
    with net.scope(within if checkpoint.has_prefix(f"{within}.") else f"{first}vision_tower"):
        with net.scope("embeddings"):
            x = net.patch_embedding("patch_embedding")
            table = net.table("position_embedding", (integer(vision, "image_size") // patch) ** 2)
            x = net.op("Add", x, net.op("Gather", table, positions, axis=0))
        for layer in range(config.num_layers):
            with net.scope(f"encoder.layers.{layer}"):
                x = siglip_layer(net, x, groups)
        x = net.layer_norm("post_layernorm", x)
    width = integer(with_defaults(text_config(raw, "gemma3_text"), {"hidden_size": 2304}), "hidden_size")
    with net.scope(f"{first}multi_modal_projector"):
        squares = net.op("Reshape", net.merged(x, k), net.ints(-1, k, hidden))
        x = net.op("ReduceMean", squares, net.ints(1), keepdims=0)
        x = net.rms_norm("mm_soft_emb_norm", x, view=gemma3_text.one_plus)
        states = net.op("MatMul", x, net.weight("mm_input_projection_weight", hidden, width))
    net.output(states, IMAGE_STATES, ir.DataType.FLOAT, ("tokens", width))
    return net.model()


def _vision(raw: RawConfig) -> RawConfig:
    """Return the tower's part of config.json, complete."""
    vision = mapping(raw, "vision_config")
    if (kind := vision.get("model_type", "siglip_vision_model")) != "siglip_vision_model":
        raise UnsupportedModelError(f"the tower '{kind}' is not supported; supported: siglip_vision_model")
    return with_defaults(vision, _VISION)


def _merge(raw: RawConfig, vision: RawConfig) -> int:
    """Return the patches along an edge of a token."""
    side = integer(vision, "image_size") // max(1, integer(vision, "patch_size"))
    tokens = integer(raw, "mm_tokens_per_image", 256)
    merge = next((n for n in range(1, side + 1) if side % n == 0 and (side // n) ** 2 == tokens), None)
    if merge is None:
        raise CheckpointError(
            f"config.json: mm_tokens_per_image {tokens} are no squares of {side} x {side} patches"
        )
    return merge
