"""``vision.onnx`` of Qwen2-VL: a tower for pictures of any size with a 2-D rope, and a merger of squares.

Source: https://arxiv.org/abs/2409.12191.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...contract import GROUP_ROWS, GROUPS, IMAGE_STATES
from ...errors import UnsupportedModelError
from ...records import dataclass
from ..config import RawConfig, integer, mapping, number
from ..encoders.tower import Groups, Tower, tower_config
from ..image_processor import (
    CLIP_MEAN,
    CLIP_STD,
    LOW_EDGE,
    ImageProcessor,
    check_processor,
    levels,
    token_text,
    video_settings,
)
from ..weights import Checkpoint

IMAGE_TOKEN_ID, VIDEO_TOKEN_ID = 151655, 151656
_EPSILON = 1e-6
_MOST_PIXELS = 2**28  # of a picture that a processor may ask for
_MOST_FRAMES = 16
_TOWER_SIZES: RawConfig = {  # defaults of transformers
    "depth": 32,
    "num_heads": 16,
    "hidden_act": "quick_gelu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor(ImageProcessor):
    """Pictures of any size: a picture is resized to whole tokens, within a range of pixels.

    Args:
        min_pixels: the fewest pixels of a resized picture.
        max_pixels: the most pixels of a resized picture.
        frames: frames of a patch; a picture is repeated.
        rotary: elements of a head that turn, half with the row and half with the column.
        theta: base of the frequencies.
        window: tokens along an edge of a window; 0 if no layer attends within windows.
        positions: entries along an edge of the tower's table of positions; 0 for none.
        video_min_pixels: the fewest pixels of a resized frame of a video; 0 if videos are not read.
        video_max_pixels: the most.
        tokens_per_second: places in time of a second; 0 counts the patches of ``frames`` frames instead.
    """

    min_pixels: int
    max_pixels: int
    frames: int
    rotary: int
    theta: float
    window: int = 0
    positions: int = 0
    video_min_pixels: int = 0
    video_max_pixels: int = 0
    tokens_per_second: float = 0.0

    def at_low_detail(self) -> Processor:
        most = min(self.max_pixels, LOW_EDGE**2)
        return replace(self, min_pixels=min(self.min_pixels, most), max_pixels=most)

    def within(self, least: int | None, most: int | None) -> Processor:
        most = self.max_pixels if most is None else most
        least = max(1, min(self.min_pixels, most)) if least is None else least
        changed = replace(self, min_pixels=least, max_pixels=most)
        changed.check()
        return changed

    def check(self) -> None:
        ImageProcessor.check(self)
        self.check_sizes("min_pixels", "max_pixels", most=_MOST_PIXELS)
        if self.video_token_id != -1:
            self.check_sizes("video_min_pixels", "video_max_pixels", most=_MOST_PIXELS)
        self.check_sizes("frames", most=_MOST_FRAMES)
        self.check_sizes("rotary")
        if self.rotary % 4 or not self.theta > 0:
            raise ValueError(f"'rotary' {self.rotary} must be a multiple of 4, and 'theta' positive")
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"'min_pixels' {self.min_pixels} exceeds 'max_pixels' {self.max_pixels}")
        for name in ("window", "positions"):
            if getattr(self, name):
                self.check_sizes(name)


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    vision = mapping(raw, "vision_config")
    heads = integer(vision, "num_heads", 16)
    head_dim = integer(vision, "embed_dim", 1280) // max(1, heads)
    return with_videos(processor_of(content, folder, raw, head_dim=head_dim), folder, raw)


def with_videos(
    processor: Processor,
    folder: Path,
    raw: RawConfig,
    speed: float = 0.0,
    pixels: tuple[int, int] = (128 * 28 * 28, 28 * 28 * 768),
) -> Processor:
    """Return a processor that reads videos too.

    Args:
        processor: of pictures.
        folder: the checkpoint.
        raw: the content of config.json.
        speed: ``tokens_per_second``.
        pixels: the fewest and the most, by default.

    Raises:
        UnsupportedModelError: an option is not supported.
    """
    least, most = _range(video_settings(folder), *pixels)
    token = integer(raw, "video_token_id", VIDEO_TOKEN_ID)
    return replace(
        processor,
        video_min_pixels=least,
        video_max_pixels=most,
        tokens_per_second=speed,
        video_token_id=token,
        texts={**processor.texts, "video": token_text(folder, token)},
    )


def _range(content: Mapping[str, Any], least: int, most: int) -> tuple[int, int]:
    """Return the fewest and the most pixels that a processor states, or the defaults.

    Raises:
        UnsupportedModelError: ``size`` has other keys.
    """
    size = content.get("size") or {}
    # As in transformers: the single keys count, and ``size`` may hold the names of both versions.
    known = {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}
    if not isinstance(size, dict) or size.keys() - known:
        raise UnsupportedModelError(
            f"'size' {size!r} is not supported; supported: 'shortest_edge' and 'longest_edge' in pixels"
        )
    fewest, largest = content.get("min_pixels"), content.get("max_pixels")
    return (
        int(size.get("shortest_edge", least) if fewest is None else fewest),
        int(size.get("longest_edge", most) if largest is None else largest),
    )


def processor_of(
    content: Mapping[str, Any],
    folder: Path,
    raw: RawConfig,
    *,
    head_dim: int,
    window: int = 0,
    positions: int = 0,
) -> Processor:
    """Return the processor of a checkpoint of Qwen's towers.

    Args:
        content: of preprocessor_config.json.
        folder: the checkpoint.
        raw: the content of config.json.
        head_dim: elements of a head of the tower.
        window: tokens along an edge of a window, where layers attend within windows.
        positions: entries along an edge of a table of positions, where the tower has one.

    Raises:
        UnsupportedModelError: the processor, or an option of it, is not supported.
        ValueError: it does not fit the tower.
    """
    check_processor(content, ("Qwen2VLImageProcessor",))
    least, most = _range(content, 56 * 56, 28 * 28 * 1280)
    vision = mapping(raw, "vision_config")
    processor = Processor(
        family="qwen2_vl",
        min_pixels=least,
        max_pixels=most,
        frames=int(content.get("temporal_patch_size", 2)),
        patch=int(content.get("patch_size", 14)),
        merge=int(content.get("merge_size", 2)),
        rotary=head_dim,
        theta=number(mapping(vision, "rope_parameters"), "rope_theta", 10_000.0),
        image_token_id=(token := integer(raw, "image_token_id", IMAGE_TOKEN_ID)),
        texts={"image": token_text(folder, token)},
        **levels(content, 3, CLIP_MEAN, CLIP_STD),
        window=window,
        positions=positions,
    )
    wanted = [patch_size(vision), integer(vision, "spatial_merge_size", 2), frames(vision)]
    if [processor.patch, processor.merge, processor.frames] != wanted:
        raise ValueError(f"its patches are not those of the tower: {wanted}")
    return processor


def patch_size(vision: RawConfig, default: int = 14) -> int:
    """Return the pixels of an edge of a patch."""
    return integer(vision, "patch_size", default)


def frames(vision: RawConfig) -> int:
    """Return the frames of a patch."""
    return integer(vision, "temporal_patch_size", 2)


def vision_prefix(checkpoint: Checkpoint) -> str:
    """Return the prefix of the tower's weights: that of published checkpoints or of transformers 5."""
    return "visual" if "visual.patch_embed.proj.weight" in checkpoint else "model.visual"


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph, with lazily read weights; see ``encoders/tower.py``.

    Raises:
        CheckpointError: the configuration or a weight is damaged or missing.
        UnsupportedModelError: the activation is not supported.
    """
    vision = mapping(raw, "vision_config")
    width = integer(vision, "embed_dim", 1280)
    config = tower_config(
        raw,
        {**_TOWER_SIZES, **vision},
        layers="depth",
        heads="num_heads",
        hidden_size=width,
        intermediate_size=int(width * number(vision, "mlp_ratio", 4)),
        norm_eps=_EPSILON,
    )
    patch = patch_size(vision)
    net = Tower(config, checkpoint, (3, frames(vision), patch, patch))
    groups = net.groups(GROUPS, GROUP_ROWS)
    with net.scope(vision_prefix(checkpoint)):
        x = net.patch_embedding("patch_embed.proj", bias=False)
        for layer in range(config.num_layers):
            with net.scope(f"blocks.{layer}"):
                x = net.op("Add", x, attention(net, net.layer_norm("norm1", x), groups))
                inside = net.linear("mlp.fc1", net.layer_norm("norm2", x), width, config.intermediate_size)
                inside = net.activation(inside)
                x = net.op("Add", x, net.linear("mlp.fc2", inside, config.intermediate_size, width))
        with net.scope("merger"):
            states = merger(net, net.layer_norm("ln_q", x), vision, integer(vision, "hidden_size", 3584))
    net.output(states, IMAGE_STATES, ir.DataType.FLOAT, ("tokens", states_width(vision, "hidden_size")))
    return net.model()


def states_width(vision: RawConfig, key: str) -> int:
    """Return the hidden size of the decoder, which the tower's configuration holds."""
    return integer(vision, key, 3584)


def attention(net: Tower, x: ir.Value, groups: Groups) -> ir.Value:
    """Write attention with a 2-D rope; queries, keys and values are one tensor in the checkpoint."""
    size = net.config.hidden_size
    q, k, v = net.split_linear("attn.qkv", ("q", "k", "v"), x, size, size)
    attended = net.attention(net.rotate(q), net.rotate(k), v, groups)
    return net.linear("attn.proj", attended, size, size)


def merger(net: Tower, x: ir.Value, vision: RawConfig, width: int) -> ir.Value:
    """Write the merger of normed patches: two layers over the squares of patches, [tokens, width]."""
    k = integer(vision, "spatial_merge_size", 2) ** 2
    inner = k * net.config.hidden_size
    joined = net.activation(net.linear("mlp.0", net.merged(x, k), inner, inner), "gelu")
    return net.linear("mlp.2", joined, inner, width)
