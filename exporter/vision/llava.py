"""``vision.onnx`` of LLaVA 1.5: a CLIP or SigLIP tower without its last layers, and two linear layers.

Sources: LLaVA, https://arxiv.org/abs/2310.03744; CLIP, https://arxiv.org/abs/2103.00020.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from ...contract import GROUP_ROWS, GROUPS, IMAGE_STATES, PATCH_POSITIONS
from ...errors import CheckpointError, UnsupportedModelError
from ...records import dataclass
from ..config import RawConfig, integer, mapping, with_defaults
from ..encoders.tower import Tower, tower_config
from ..image_processor import CLIP_MEAN, CLIP_STD, ImageProcessor, check_processor, levels, token_text
from ..models.llava import decoder_part
from ..weights import Checkpoint
from . import mistral3
from .idefics3 import siglip_layer

_MOST_TILES = 4096
_CLIP: RawConfig = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "layer_norm_eps": 1e-5,
    "hidden_act": "quick_gelu",
}
_SIGLIP: RawConfig = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 14,
    "image_size": 384,
    "patch_size": 14,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
}
_TOWERS = {"clip_vision_model": _CLIP, "siglip_vision_model": _SIGLIP}


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor(ImageProcessor):
    """A picture in one square tile, or beside it in tiles of the best of several resolutions.

    Args:
        tile: pixels of an edge of a tile.
        class_token: whether the tower has a state of the whole tile, in front of those of the patches.
        pads: whether a picture is padded to a square before it is resized; otherwise its middle is taken.
        resolutions: (height, width) of each canvas of whole tiles; none for one tile.
    """

    tile: int
    class_token: bool
    pads: bool = False
    resolutions: tuple[tuple[int, int], ...] = ()

    @property
    def constants(self) -> int:
        """See ``ImageProcessor``: the end of a row of tiles."""
        return 1 if self.resolutions else 0

    def at_low_detail(self) -> Processor:
        fewest = min(map(math.prod, self.resolutions), default=0)
        return replace(
            self, resolutions=tuple(each for each in self.resolutions if math.prod(each) == fewest)
        )

    def check(self) -> None:
        ImageProcessor.check(self)
        self.check_sizes("tile")
        if self.tile % self.patch or self.merge != 1:
            raise ValueError(
                f"tiles of {self.tile} pixels must hold whole patches of {self.patch} pixels, each a token"
            )
        for size in self.resolutions:
            if len(size) != 2 or not all(type(edge) is int and edge > 0 for edge in size):
                raise ValueError(f"a resolution must be a height and a width, found {size!r}")
            height, width = size
            if height % self.tile or width % self.tile or height * width > _MOST_TILES * self.tile**2:
                raise ValueError(
                    f"the resolution {height} x {width} is not one of whole tiles of {self.tile}"
                )


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> ImageProcessor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    if _is_pixtral(raw):
        token = integer(raw, "image_token_id", integer(raw, "image_token_index", 32_000))
        one = {**raw, "spatial_merge_size": 1, "image_token_id": token}
        return mistral3.image_processor(content, folder, one)
    check_processor(content, ("CLIPImageProcessor", "LlavaImageProcessor"))
    pads = bool(content.get("do_pad", False)) and "Llava" in str(content["image_processor_type"])
    if content.get("do_center_crop", True) is not True:
        raise UnsupportedModelError("'do_center_crop': False is not supported; supported: true")
    return processor_of(content, folder, raw, "llava", kind=Processor, pads=pads)


_Kind = TypeVar("_Kind", bound=Processor)


def processor_of(
    content: Mapping[str, Any],
    folder: Path,
    raw: RawConfig,
    family: str,
    *,
    kind: type[_Kind],
    **options: Any,
) -> _Kind:
    """Return the processor of a checkpoint of LLaVA's kind.

    Args:
        content: of preprocessor_config.json.
        folder: the checkpoint.
        raw: the content of config.json.
        family: the geometry.
        kind: the class of its record.
        options: further fields of it.

    Raises:
        UnsupportedModelError: an option is not supported.
        ValueError: it does not fit the tower.
    """
    vision = _vision(raw)
    size, crop = content.get("size", {"shortest_edge": 224}), content.get("crop_size")
    edge = size.get("shortest_edge", size.get("height")) if isinstance(size, dict) else size
    crops = crop if isinstance(crop, dict) else {"height": edge if crop is None else crop}
    if {edge, *crops.values(), *(size.values() if isinstance(size, dict) else ())} != {
        integer(vision, "image_size")
    }:
        raise UnsupportedModelError(
            f"'size' {size!r} and 'crop_size' {crop!r} are not supported; supported: the tower's "
            f"'image_size' {vision['image_size']}"
        )
    default = integer(raw, "image_token_index", 32_000)
    token = integer(raw, "image_token_id", default)
    return kind(
        family=family,
        tile=integer(vision, "image_size"),
        class_token=vision["model_type"] == "clip_vision_model",
        patch=integer(vision, "patch_size"),
        merge=1,
        image_token_id=token,
        texts={"image": token_text(folder, token)},
        **levels(content, 3, CLIP_MEAN, CLIP_STD),
        **options,
    )


def vision_model(raw: RawConfig, checkpoint: Checkpoint, *, joined: int = 1) -> ir.Model:
    """Build the graph, with lazily read weights; see ``encoders/tower.py``.

    A state of a whole tile is that of a patch of zeros at position 0. If the checkpoint has a row for the
    ends of rows of tiles, it is the last row of the output.

    Args:
        raw: the content of config.json.
        checkpoint: the weights.
        joined: patches whose mean becomes a token.

    Raises:
        CheckpointError: the configuration or a weight is damaged or missing.
        UnsupportedModelError: an option is not supported.
    """
    if _is_pixtral(raw):
        return _pixtral_model(raw, checkpoint)
    vision = _vision(raw)
    clip = vision["model_type"] == "clip_vision_model"
    strategy = raw.get("vision_feature_select_strategy", "default" if clip else "full")
    if strategy != ("default" if clip else "full"):
        raise UnsupportedModelError(
            f"'vision_feature_select_strategy' '{strategy}' is not supported with '{vision['model_type']}'"
        )
    config = tower_config(raw, vision, num_layers=_used_layers(raw, vision))
    patch, hidden = integer(vision, "patch_size"), config.hidden_size
    old = checkpoint.has_prefix("vision_tower.")
    first = "" if old else "model."
    within = f"{first}vision_tower.vision_model"
    tower = within if checkpoint.has_prefix(f"{within}.") else f"{first}vision_tower"
    net = Tower(config, checkpoint, (3, patch, patch))
    with net.scope(tower):
        x = tower_states(net, vision, class_token=clip)
    width = integer(decoder_part(raw), "hidden_size")
    with net.scope(f"{first}multi_modal_projector"):
        bias = bool(raw.get("multimodal_projector_bias", True))
        x = net.linear("linear_1", net.mean_of(x, joined), hidden, width, bias=bias)
        x = net.activation(x, str(raw.get("projector_hidden_act", "gelu")))
        states = net.linear("linear_2", x, width, width, bias=bias)
    newline = f"{first}image_newline"
    if newline in checkpoint:
        row = net.op("Unsqueeze", net.weight(newline, width), net.ints(0))
        states = net.op("Concat", states, row, axis=0)
    net.output(states, IMAGE_STATES, ir.DataType.FLOAT, ("tokens", width))
    return net.model()


def tower_states(net: Tower, vision: RawConfig, *, class_token: bool) -> ir.Value:
    """Write the layers of CLIP or SigLIP in the scope of the tower, and return the states of all patches.

    ``class_token`` says whether it is CLIP: a state of a whole tile is that of a patch of zeros at position
    0, and a norm is in front of the layers.
    """
    groups = net.groups(GROUPS, GROUP_ROWS)
    positions = net.input(PATCH_POSITIONS, ir.DataType.INT64, ("patches",))
    with net.scope("embeddings"):
        x = net.patch_embedding("patch_embedding", bias=not class_token)
        count = (integer(vision, "image_size") // max(1, integer(vision, "patch_size"))) ** 2 + class_token
        places = net.op("Gather", net.table("position_embedding", count), positions, axis=0)
        x = net.op("Add", x, places)
        if class_token:
            whole = net.op("Equal", positions, net.constant(0, np.int64, "0"))
            zero = net.constant(0, np.float32, "zero")
            token = net.weight("class_embedding", net.config.hidden_size)
            extra = net.op("Where", net.op("Unsqueeze", whole, net.ints(1)), token, zero)
            x = net.op("Add", x, extra)
    if class_token:
        x = net.layer_norm("pre_layrnorm", x)  # the name in the checkpoints
    for layer in range(net.config.num_layers):
        with net.scope(f"encoder.layers.{layer}"):
            x = siglip_layer(net, x, groups)
    return x


def _is_pixtral(raw: RawConfig) -> bool:
    """Whether the tower is that of Pixtral, of which each patch is a token."""
    return mapping(raw, "vision_config").get("model_type") == "pixtral"


def _pixtral_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    if (strategy := raw.get("vision_feature_select_strategy", "full")) != "full":
        raise UnsupportedModelError(
            f"'vision_feature_select_strategy' '{strategy}' is not supported with 'pixtral'"
        )
    first = "" if checkpoint.has_prefix("vision_tower.") else "model."
    names = (f"{first}vision_tower", f"{first}multi_modal_projector")
    full = {"multimodal_projector_bias": True, **raw, "text_config": decoder_part(raw)}
    return mistral3.tower_model(full, checkpoint, names, merges=False)


def _vision(raw: RawConfig) -> RawConfig:
    """Return the tower's part of config.json, complete.

    Raises:
        UnsupportedModelError: the kind of tower is not supported.
    """
    vision = mapping(raw, "vision_config")
    kind = vision.get("model_type", "clip_vision_model")
    if kind not in _TOWERS:
        raise UnsupportedModelError(
            f"'{raw['model_type']}' with the tower '{kind}' is not supported; supported: "
            f"{', '.join(_TOWERS)}, and in LLaVA pixtral"
        )
    return {**with_defaults(vision, _TOWERS[kind]), "model_type": kind}


def _used_layers(raw: RawConfig, vision: RawConfig) -> int:
    """Return how many layers are in front of the states that the decoder reads."""
    total = integer(vision, "num_hidden_layers")
    layer = raw.get("vision_feature_layer", -2 if vision["model_type"] == "clip_vision_model" else -1)
    if type(layer) is not int:
        raise UnsupportedModelError(
            f"'vision_feature_layer' {layer!r} is not supported; supported: one layer"
        )
    used = layer if layer >= 0 else total + 1 + layer
    if not 0 <= used <= total:
        raise CheckpointError(f"config.json: 'vision_feature_layer' {layer} is not one of {total} layers")
    return used
