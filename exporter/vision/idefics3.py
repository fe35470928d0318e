"""``vision.onnx`` of Idefics3 and SmolVLM: a SigLIP tower, pixel shuffle, and one projection.

Sources: SigLIP https://arxiv.org/abs/2303.15343, Idefics3 https://arxiv.org/abs/2408.12637. The graph has no
logic of shapes: which patches attend to each other, where they are and which of them join into a token are
inputs, computed on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...contract import GROUP_ROWS, GROUPS, IMAGE_STATES, PATCH_POSITIONS
from ...errors import UnsupportedModelError
from ...records import dataclass
from ..config import RawConfig, integer, mapping
from ..encoders.encoder import EncoderConfig
from ..encoders.pre_norm import pre_norm_layer
from ..encoders.tower import Groups, Tower, tower_config
from ..image_processor import HALF, ImageProcessor, check_processor, levels, named_tokens
from ..weights import Checkpoint

_TOWER, _PROJECTION = "model.vision_model", "model.connector.modality_projection.proj"

_TOKENS = {
    "image": ("image_token", "<image>"),
    "around": ("fake_image_token", "<fake_token_around_image>"),
    "whole": ("global_image_token", "<global-img>"),
}
_TOWER_SIZES: RawConfig = {  # defaults of transformers
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-06,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor(ImageProcessor):
    """Pictures cut into tiles, as in Idefics3 and SmolVLM.

    Args:
        longest_edge: pixels of the longest edge that a picture is resized to, before it is cut.
        tile: pixels of an edge of a tile, all of which are square.
        splits: whether a picture is cut into tiles; False resizes it to one.
        positions: entries along an edge of the tower's table of positions.
        video_edge: pixels of the longest edge that a frame of a video is resized to, before it is resized to
            one tile; 0 if videos are not read.
    """

    longest_edge: int
    tile: int
    splits: bool
    positions: int
    video_edge: int = 0

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return (self.tile // self.patch // self.merge) ** 2

    def at_low_detail(self) -> Processor:
        return replace(self, splits=False)

    def check(self) -> None:
        ImageProcessor.check(self)
        self.check_sizes("longest_edge", "tile", "positions")
        if self.tile % (self.patch * self.merge):
            raise ValueError(
                f"tiles of {self.tile} pixels do not hold whole tokens of {self.merge} patches of "
                f"{self.patch} pixels along an edge"
            )
        self.check_texts("around", "whole")
        if "video" in self.texts:
            self.check_sizes("video_edge")


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    check_processor(content, ("Idefics3ImageProcessor", "SmolVLMImageProcessor"))
    vision = mapping(raw, "vision_config")
    edge, patch = integer(vision, "image_size", 224), integer(vision, "patch_size", 32)
    return Processor(
        family="idefics3",
        longest_edge=longest_edge(content.get("size", {"longest_edge": 4 * 364}), "size"),
        tile=longest_edge(content.get("max_image_size", {"longest_edge": 364}), "max_image_size"),
        splits=bool(content.get("do_image_splitting", True)),
        patch=patch,
        merge=integer(raw, "scale_factor", 2),
        positions=edge // max(1, patch),
        image_token_id=integer(raw, "image_token_id", 128257),
        texts=named_tokens(folder, _TOKENS),
        **levels(content, 1, HALF, HALF),
    )


def longest_edge(size: Any, key: str) -> int:
    """Return the pixels of the longest edge that a processor states.

    Raises:
        UnsupportedModelError: it states a size in another way.
    """
    if (
        not isinstance(size, dict)
        or size.keys() - {"longest_edge"}
        or not isinstance(size.get("longest_edge"), int)
    ):
        raise UnsupportedModelError(
            f"'{key}' {size!r} is not supported; supported: an integer 'longest_edge'"
        )
    return int(size["longest_edge"])


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
    net = Tower(config, checkpoint, (channels, patch, patch))
    positions = net.input(PATCH_POSITIONS, ir.DataType.INT64, ("patches",))
    groups = net.groups(GROUPS, GROUP_ROWS)
    with net.scope(_TOWER):
        with net.scope("embeddings"):
            x = net.patch_embedding("patch_embedding")
            places = net.op("Gather", net.table("position_embedding", table), positions, axis=0)
            x = net.op("Add", x, places)
        for layer in range(config.num_layers):
            with net.scope(f"encoder.layers.{layer}"):
                x = siglip_layer(net, x, groups)
        x = net.layer_norm("post_layernorm", x)
    flat = net.merged(x, k)
    states = net.linear(_PROJECTION, flat, k * config.hidden_size, width, bias=False)
    net.output(states, IMAGE_STATES, ir.DataType.FLOAT, ("tokens", width))
    return net.model()


def _config(raw: RawConfig, vision: RawConfig) -> EncoderConfig:
    return tower_config(raw, {**_TOWER_SIZES, **vision})


def siglip_layer(net: Tower, x: ir.Value, groups: Groups, *, rotates: bool = False) -> ir.Value:
    """Write one layer of a tower; x is [patches, hidden].

    ``rotates`` says whether queries and keys have a 2-D rope.
    """

    def attend(q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
        if rotates:
            q, k = net.rotate(q), net.rotate(k)
        return net.attention(q, k, v, groups)

    return pre_norm_layer(net, x, attend)
