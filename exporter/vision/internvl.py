"""``vision.onnx`` of InternVL 3: a tower whose layers scale what they add, pixel shuffle, and two layers.

Sources: InternVL 3, https://arxiv.org/abs/2504.10479; LayerScale, https://arxiv.org/abs/2103.17239.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ...contract import GROUP_ROWS, GROUPS, IMAGE_STATES, PATCH_POSITIONS
from ...errors import UnsupportedModelError
from ...records import dataclass
from ..config import RawConfig, integer, mapping, number
from ..encoders.tower import Groups, Tower, tower_config
from ..image_processor import (
    CLIP_MEAN,
    CLIP_STD,
    ImageProcessor,
    check_processor,
    levels,
    named_tokens,
    token_text,
)
from ..models.llava import decoder_part
from ..weights import Checkpoint

_MOST_TILES = 256
_PROJECTOR_EPSILON = 1e-5
_TOWER_SIZES: RawConfig = {  # defaults of transformers
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-06,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor(ImageProcessor):
    """A picture in tiles of the best aspect ratio, followed by the whole picture in one tile.

    Args:
        tile: pixels of an edge of a tile.
        min_tiles: the fewest tiles.
        max_tiles: the most tiles; 1 for the whole picture only.
    """

    tile: int
    min_tiles: int
    max_tiles: int

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return (self.tile // self.patch // self.merge) ** 2

    def at_low_detail(self) -> Processor:
        return replace(self, min_tiles=1, max_tiles=1)

    def check(self) -> None:
        ImageProcessor.check(self)
        self.check_sizes("tile")
        self.check_sizes("min_tiles", "max_tiles", most=_MOST_TILES)
        if self.min_tiles > self.max_tiles:
            raise ValueError(f"'min_tiles' {self.min_tiles} exceeds 'max_tiles' {self.max_tiles}")
        if self.tile % (self.patch * self.merge):
            raise ValueError(
                f"tiles of {self.tile} pixels do not hold whole tokens of {self.merge} patches of "
                f"{self.patch} pixels along an edge"
            )
        self.check_texts("start", "end")


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    check_processor(content, ("GotOcr2ImageProcessor",))
    vision = mapping(raw, "vision_config")
    tile = _edge(vision, "image_size", 448)
    size = content.get("size", {"height": 384, "width": 384})
    if size != {"height": tile, "width": tile}:
        raise UnsupportedModelError(
            f"'size' {size!r} is not supported; supported: the tower's {tile} x {tile}"
        )
    ratio = number(raw, "downsample_ratio", 0.5)
    if ratio <= 0 or 1 / ratio != int(1 / ratio):
        raise UnsupportedModelError(f"'downsample_ratio' {ratio} is not supported; supported: 1 / N")
    token = integer(raw, "image_token_id", 151_667)
    names = {"start": ("start_image_token", "<img>"), "end": ("end_image_token", "</img>")}
    # ``crop_to_patches`` has no effect: transformers' processor cuts pictures whatever the file says.
    return Processor(
        family="internvl",
        tile=tile,
        min_tiles=int(content.get("min_patches", 1)),
        max_tiles=int(content.get("max_patches", 12)),
        patch=_edge(vision, "patch_size", 14),
        merge=int(1 / ratio),
        image_token_id=token,
        texts={"image": token_text(folder, token), **named_tokens(folder, names)},
        **levels(content, 3, CLIP_MEAN, CLIP_STD),
    )


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph, with lazily read weights; see ``encoders/tower.py``.

    The state of a whole tile is that of a patch of zeros at position 0.

    Raises:
        CheckpointError: the configuration or a weight is damaged or missing.
        UnsupportedModelError: an option is not supported.
    """
    vision = mapping(raw, "vision_config")
    _check(raw, vision)
    config = tower_config(
        raw, {**_TOWER_SIZES, **vision}, attention_bias=bool(vision.get("attention_bias", False))
    )
    patch, hidden = _edge(vision, "patch_size", 14), config.hidden_size
    first = "" if checkpoint.has_prefix("vision_tower.") else "model."
    net = Tower(config, checkpoint, (3, patch, patch))
    groups = net.groups(GROUPS, GROUP_ROWS)
    positions = net.input(PATCH_POSITIONS, ir.DataType.INT64, ("patches",))
    with net.scope(f"{first}vision_tower"):
        x = _embeddings(net, positions, (_edge(vision, "image_size", 448) // max(1, patch)) ** 2 + 1)
        for layer in range(config.num_layers):
            with net.scope(f"encoder.layer.{layer}"):
                x = _layer(net, x, groups, vision)
        if not vision.get("use_mean_pooling", True):
            x = net.layer_norm("layernorm", x)
    merge, width = int(1 / number(raw, "downsample_ratio", 0.5)), integer(decoder_part(raw), "hidden_size")
    inner = hidden * merge**2
    with net.scope(f"{first}multi_modal_projector"):
        joined = net.merged(x, merge**2)
        with net.scope("layer_norm"):
            weights = [net.weight(name, inner) for name in ("weight", "bias")]
            joined = net.op("LayerNormalization", joined, *weights, axis=-1, epsilon=_PROJECTOR_EPSILON)
        joined = net.linear("linear_1", joined, inner, width)
        joined = net.activation(joined, str(raw.get("projector_hidden_act", "gelu")))
        states = net.linear("linear_2", joined, width, width)
    net.output(states, IMAGE_STATES, ir.DataType.FLOAT, ("tokens", width))
    return net.model()


def _embeddings(net: Tower, positions: ir.Value, count: int) -> ir.Value:
    hidden = net.config.hidden_size
    with net.scope("embeddings"):
        table = net.checkpoint.tensor(
            net.qualified("position_embeddings"), (1, count, hidden), view=lambda array: array[0]
        )
        token = net.checkpoint.tensor(
            net.qualified("cls_token"), (1, 1, hidden), view=lambda array: array.reshape(hidden)
        )
        x = net.patch_embedding("patch_embeddings.projection")
        # In place of the states of the patches of zeros, which hold the bias of the projection.
        whole = net.op("Equal", positions, net.constant(0, np.int64, "0"))
        x = net.op("Where", net.op("Unsqueeze", whole, net.ints(1)), net.initializer(token), x)
        return net.op("Add", x, net.op("Gather", net.initializer(table), positions, axis=0))


def _layer(net: Tower, x: ir.Value, groups: Groups, vision: RawConfig) -> ir.Value:
    """Write one layer: x += scale * attention(norm(x)); x += scale * mlp(norm(x))."""
    c = net.config
    size, inner, bias = c.hidden_size, c.intermediate_size, c.attention_bias
    norm = net.rms_norm if vision.get("norm_type") == "rms_norm" else net.layer_norm
    normed = norm("layernorm_before", x)
    with net.scope("attention"):
        q, k, v = (net.linear(name, normed, size, size, bias=bias) for name in ("q_proj", "k_proj", "v_proj"))
        if vision.get("use_qk_norm"):
            q, k = net.rms_norm("q_norm", q), net.rms_norm("k_norm", k)
        attended = net.linear("projection_layer", net.attention(q, k, v, groups), size, size)
    x = net.op("Add", x, net.op("Mul", attended, net.weight("lambda_1", size)))
    inside = net.activation(net.linear("mlp.fc1", norm("layernorm_after", x), size, inner))
    added = net.op("Mul", net.linear("mlp.fc2", inside, inner, size), net.weight("lambda_2", size))
    return net.op("Add", x, added)


def _check(raw: RawConfig, vision: RawConfig) -> None:
    """Raise UnsupportedModelError for options that change the tower's form."""
    wanted = {
        "vision_feature_layer": (raw.get("vision_feature_layer", -1), (-1,)),
        "vision_feature_select_strategy": (
            raw.get("vision_feature_select_strategy", "default"),
            ("default",),
        ),
        "norm_type": (vision.get("norm_type", "layer_norm"), ("layer_norm", "rms_norm")),
        "use_absolute_position_embeddings": (vision.get("use_absolute_position_embeddings", True), (True,)),
    }
    for name, (value, known) in wanted.items():
        if value not in known:
            raise UnsupportedModelError(
                f"'{name}' {value!r} is not supported; supported: {', '.join(map(str, known))}"
            )


def _edge(vision: RawConfig, key: str, default: int) -> int:
    """Return an edge in pixels of a square, which files give once or twice.

    Raises:
        UnsupportedModelError: it is not a square.
    """
    value = vision.get(key, default)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    if isinstance(value, list):
        raise UnsupportedModelError(f"'{key}' {value!r} is not supported; supported: a square")
    return integer({key: value}, key)
